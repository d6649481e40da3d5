"""Heads through moves: reshapes, cuts, joins, look-ups."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir

from ..graph import attribute_int, attribute_ints
from .heads_base import Heads
from .spread import HeadsMix, Spread, shape_of, through_reshape


class Moves(Heads):
    """Rules of nodes that move entries about."""

    def _on_transpose(self, node: ir.Node, proto: onnx.NodeProto) -> None:
        spread = self._only(node)
        rank = len(shape_of(node.outputs[0]))
        order = attribute_ints(node, "perm") or list(range(rank))[::-1]
        self._give(node, Spread(order.index(spread.axis), spread.owner))

    def _on_reshape(self, node: ir.Node, proto: onnx.NodeProto) -> None:
        spread = self._only(node)
        before, after = shape_of(node.inputs[0]), shape_of(node.outputs[0])  # type: ignore[arg-type]
        moved = through_reshape(before, after, spread)
        target = list(after)
        target[moved.axis] = self.kept_count(moved)
        proto.input[1] = self.tensor("shape", np.array(target, np.int64))
        self._give(node, moved)

    def _on_gather(self, node: ir.Node, proto: onnx.NodeProto) -> None:
        spread = self._only(node)
        data, index = node.inputs[0], node.inputs[1]
        assert data is not None and index is not None
        axis = attribute_int(node, "axis", 0) % len(shape_of(data))
        if axis == spread.axis:
            raise HeadsMix("it picks heads")
        moved = spread.axis + (len(shape_of(index)) - 1 if axis < spread.axis else 0)
        self._give(node, Spread(moved, spread.owner))

    def _on_unsqueeze(self, node: ir.Node, proto: onnx.NodeProto) -> None:
        spread = self._only(node)
        rank = len(shape_of(node.outputs[0]))
        new = {a % rank for a in self._const_ints(node.inputs[1])}
        kept = [i for i in range(rank) if i not in new]
        self._give(node, Spread(kept[spread.axis], spread.owner))

    def _on_squeeze(self, node: ir.Node, proto: onnx.NodeProto) -> None:
        spread = self._only(node)
        shape = shape_of(node.inputs[0])  # type: ignore[arg-type]
        axes = self._const_ints(node.inputs[1]) if len(node.inputs) > 1 else [i for i, d in enumerate(shape) if d == 1]
        gone = {a % len(shape) for a in axes}
        if spread.axis in gone:
            raise HeadsMix("it drops the heads' axis")
        self._give(node, Spread(spread.axis - sum(1 for a in gone if a < spread.axis), spread.owner))

    def _on_expand(self, node: ir.Node, proto: onnx.NodeProto) -> None:
        spread = self._only(node)
        before, after = shape_of(node.inputs[0]), shape_of(node.outputs[0])  # type: ignore[arg-type]
        axis = spread.axis + len(after) - len(before)
        target = list(after)
        target[axis] = self.kept_count(spread)
        proto.input[1] = self.tensor("shape", np.array(target, np.int64))
        self._give(node, Spread(axis, spread.owner))

    def _on_slice(self, node: ir.Node, proto: onnx.NodeProto) -> None:
        spread = self._only(node)
        rank = len(shape_of(node.outputs[0]))
        starts, ends = self._const_ints(node.inputs[1]), self._const_ints(node.inputs[2])
        axes = (
            self._const_ints(node.inputs[3])
            if len(node.inputs) > 3 and node.inputs[3] is not None
            else range(len(starts))
        )
        axes = [a % rank for a in axes]
        if spread.axis not in axes:
            self._give(node, spread)
            return
        at = axes.index(spread.axis)
        if len(node.inputs) > 4 and node.inputs[4] is not None and self._const_ints(node.inputs[4])[at] != 1:
            raise HeadsMix("it steps over heads")
        size = len(spread.owner)
        start, end = (min(max(i + size if i < 0 else i, 0), size) for i in (starts[at], ends[at]))
        kept = spread.kept(self.keep)
        starts[at], ends[at] = sum(i < start for i in kept), sum(i < end for i in kept)
        proto.input[1] = self.tensor("starts", np.array(starts, np.int64))
        proto.input[2] = self.tensor("ends", np.array(ends, np.int64))
        self._give(node, Spread(spread.axis, spread.owner[start:end]))

    def _on_split(self, node: ir.Node, proto: onnx.NodeProto) -> None:
        spread = self._only(node)
        rank = len(shape_of(node.inputs[0]))  # type: ignore[arg-type]
        axis = attribute_int(node, "axis", 0) % rank
        if axis != spread.axis:
            for i in range(len(node.outputs)):
                self._give(node, spread, i)
            return
        sizes, start = [], 0
        for i, value in enumerate(node.outputs):
            size = shape_of(value)[axis]
            part = Spread(axis, spread.owner[start : start + size])
            start += size
            sizes.append(self.kept_count(part))
            self._give(node, part, i)
        name = self.tensor("split", np.array(sizes, np.int64))
        del proto.input[1:]
        proto.input.append(name)
        for attribute in list(proto.attribute):
            if attribute.name in ("num_outputs", "split"):
                proto.attribute.remove(attribute)

    def _on_concat(self, node: ir.Node, proto: onnx.NodeProto) -> None:
        rank = len(shape_of(node.outputs[0]))
        axis = attribute_int(node, "axis", 0) % rank
        values = [v for v in node.inputs if v is not None]
        if any(v in self.spreads and self.spreads[v].axis == axis for v in values):
            if not all(v in self.spreads and self.spreads[v].axis == axis for v in values):
                raise HeadsMix("it joins heads to something else")
            self._give(node, Spread(axis, tuple(h for v in values for h in self.spreads[v].owner)))
            return
        spread = self._aligned(node, rank, values)
        self._cut_constants(node, proto, spread)
        self._give(node, spread)

    def _cut_constants(self, node: ir.Node, proto: onnx.NodeProto, spread: Spread) -> None:
        """The inputs without heads, which must be constants of the output's rank, become those of the kept heads."""
        for i, value in enumerate(node.inputs):
            if value is not None and value not in self.spreads:
                if not self.view.is_const(value):
                    raise HeadsMix(f"{value.name!r} does not come from the operands")
                proto.input[i] = self.cut(value, spread, spread.axis)

    def _on_pad(self, node: ir.Node, proto: onnx.NodeProto) -> None:
        spread = self._only(node)
        pads = self._const_ints(node.inputs[1])
        rank = len(shape_of(node.outputs[0]))
        if len(node.inputs) > 3 and node.inputs[3] is not None:
            axes = [a % rank for a in self._const_ints(node.inputs[3])]
        else:
            axes = list(range(rank))
        half = len(pads) // 2
        if any(a == spread.axis and (pads[i] or pads[i + half]) for i, a in enumerate(axes)):
            raise HeadsMix("it pads the heads")
        self._give(node, spread)

    def _on_scatterelements(self, node: ir.Node, proto: onnx.NodeProto) -> None:
        rank = len(shape_of(node.outputs[0]))
        spread = self._aligned(node, rank, node.inputs)
        if attribute_int(node, "axis", 0) % rank == spread.axis:
            raise HeadsMix("it scatters over the heads")
        self._cut_constants(node, proto, spread)
        self._give(node, spread)

    def _on_scatternd(self, node: ir.Node, proto: onnx.NodeProto) -> None:
        data, indices, updates = node.inputs
        assert data is not None and indices is not None and updates is not None
        shape = shape_of(indices)
        depth, lead = shape[-1], len(shape) - 1
        spreads = set()
        if data in self.spreads:
            spreads.add(self.spreads[data])
        if updates in self.spreads:
            spread = self.spreads[updates]
            spreads.add(Spread(spread.axis - lead + depth, spread.owner))
        if len(spreads) != 1 or indices in self.spreads:
            raise HeadsMix("its operands have their heads in different places")
        spread = next(iter(spreads))
        if spread.axis < depth:
            raise HeadsMix("it scatters over the heads")
        for i, value, axis in ((0, data, spread.axis), (2, updates, spread.axis - depth + lead)):
            if value not in self.spreads:
                if not self.view.is_const(value):
                    raise HeadsMix(f"{value.name!r} does not come from the operands")
                proto.input[i] = self.cut(value, spread, axis)
        self._give(node, spread)
