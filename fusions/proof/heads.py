"""A smaller, sound proof for frozen real-size exports: the same region with two of its heads.

Every value of the region is followed to see which of its axes, if any, runs over heads, and which index belongs to
which head. Each node must treat that axis as a batch axis: then heads do not mix, the region computes each head on its
own, and the region cut down to some heads gives exactly those heads' part of the whole region's results. An op without
a rule, or a node that mixes heads, stops the attempt with a reason.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

import numpy as np
import onnx
import onnx_ir as ir
from onnx import numpy_helper

from ..graph import GraphView, attribute_int, attribute_ints, attribute_string
from .spread import HeadsMix, Spread, shape_of, through_reshape

ELEMENTWISE = frozenset(
    "Abs Add And Cast Ceil Clip Div Equal Erf Exp Floor Greater GreaterOrEqual HardSigmoid Identity IsNaN Less "
    "LessOrEqual Log Max Min Mul Neg Not Or Pow QuickGelu Reciprocal Relu Sigmoid Sign Softplus Sqrt Sub Swish Tanh "
    "Where Xor".split()
)
REDUCTIONS = frozenset("ReduceL2 ReduceMax ReduceMean ReduceMin ReduceSum ReduceSumSquare".split())
NORMS = frozenset("RMSNormalization SimplifiedLayerNormalization LpNormalization".split())


class HeadSlicer:
    """Follows heads through nodes and writes the cut-down nodes.

    Args:
        view: the graph.
        keep: heads that stay.
        spreads: where heads lie in the region's inputs.
        constants: arrays of the constants, parameters perturbed already.
        parameters: constants that the op takes as parameters; all others must be the same for every head, or the heads
            that are cut away could differ from those that stay.
        shared: this many heads may share what an `Expand` gives each of them; 0: no `Expand` is cut for that.
    """

    def __init__(
        self,
        view: GraphView,
        keep: Iterable[int],
        spreads: Mapping[ir.Value, Spread],
        constants: Callable[[ir.Value], np.ndarray],
        parameters: Collection[ir.Value],
        shared: int = 0,
    ) -> None:
        self.parameters, self.shared = parameters, shared
        self.view, self.keep, self.constants = view, frozenset(keep), constants
        self.spreads: dict[ir.Value, Spread] = dict(spreads)
        self.tensors: dict[str, onnx.TensorProto] = {}

    # --- output of the cut-down graph ---------------------------------------------------------------------------

    def tensor(self, stem: str, array: np.ndarray) -> str:
        """A new initializer; equal requests give one tensor."""
        array = np.ascontiguousarray(array)
        name = f"{stem}__{hash((array.dtype.str, array.shape, array.tobytes())) & 0xFFFFFFFFFFFF:x}"
        if name not in self.tensors:
            self.tensors[name] = numpy_helper.from_array(array, name)
        return name

    def cut(self, value: ir.Value, spread: Spread, axis: int) -> str:
        """The name of a constant, cut along ``axis`` where it has heads there."""
        array = self.constants(value)
        if value not in self.parameters and not _same_for_all(array, spread, axis):
            raise HeadsMix(f"the constant {value.name!r} differs from head to head and is no parameter of the op")
        if array.ndim == 0 or array.shape[axis] == 1:
            return self.tensor(value.name or "constant", array)
        if array.shape[axis] != len(spread.owner):
            raise HeadsMix(
                f"the constant {value.name!r} has {array.shape[axis]} entries where heads make {len(spread.owner)}"
            )
        return self.tensor(value.name or "constant", np.take(array, spread.kept(self.keep), axis=axis))

    def kept_count(self, spread: Spread) -> int:
        return len(spread.kept(self.keep))

    # --- the walk ---------------------------------------------------------------------------------------------------

    def run(self, nodes: list[ir.Node], protos: list[onnx.NodeProto]) -> None:
        """Follow the heads through the nodes, in order, and change their protos in place."""
        for node, proto in zip(nodes, protos, strict=True):
            touched = [v for v in node.inputs if v is not None and v in self.spreads]
            if not touched:
                if self.shared and node.op_type == "Expand":
                    self._share(node, proto)
                continue
            try:
                self._node(node, proto)
            except HeadsMix as error:
                raise HeadsMix(f"{node.op_type} {node.name!r}: {error}") from None

    def _node(self, node: ir.Node, proto: onnx.NodeProto) -> None:
        kind = node.op_type
        if kind in ELEMENTWISE:
            self._elementwise(node, proto)
        elif kind in REDUCTIONS:
            self._reduce(node)
        elif kind in NORMS:
            spread = self._only(node)
            if spread.axis == len(shape_of(node.outputs[0])) - 1:
                raise HeadsMix("it runs over the heads")
            self._give(node, spread)
        else:
            rule = getattr(self, f"_on_{kind.lower()}", None)
            if rule is None or node.domain not in ("", "ai.onnx"):
                raise HeadsMix("no rule for this op")
            rule(node, proto)

    def _give(self, node: ir.Node, spread: Spread, output: int = 0) -> None:
        value = node.outputs[output]
        if set(spread.owner) != set(self._all_heads):
            raise HeadsMix("it picks some of the heads")
        self.spreads[value] = spread

    @property
    def _all_heads(self) -> set[int]:
        first = next(iter(self.spreads.values()))
        return set(first.owner)

    def _share(self, node: ir.Node, proto: onnx.NodeProto) -> None:
        """What is repeated for each head is cut where it is repeated."""
        before, after = shape_of(node.inputs[0]), shape_of(node.outputs[0])  # type: ignore[arg-type]
        before = [1] * (len(after) - len(before)) + before
        grown = [i for i, (a, b) in enumerate(zip(before, after, strict=True)) if a == 1 and b == self.shared]
        if not grown:
            return
        axis = 1 if 1 in grown else grown[0]
        spread = Spread(axis, tuple(range(self.shared)))
        target = list(after)
        target[axis] = self.kept_count(spread)
        proto.input[1] = self.tensor("shape", np.array(target, np.int64))
        self.spreads[node.outputs[0]] = spread

    def _only(self, node: ir.Node) -> Spread:
        """The spread of the first input, which must be the only one that has heads."""
        first = node.inputs[0]
        if (
            first is None
            or first not in self.spreads
            or any(v in self.spreads for v in node.inputs[1:] if v is not None)
        ):
            raise HeadsMix("heads where none were expected")
        return self.spreads[first]

    def _const_ints(self, value: ir.Value | None) -> list[int]:
        found = self.view.ints(value)
        if found is None:
            raise HeadsMix("an operand that should be constant is computed")
        return found

    # --- rules ------------------------------------------------------------------------------------------------------

    def _aligned(self, node: ir.Node, rank: int, values: Iterable[ir.Value | None]) -> Spread:
        """One spread, in the output's axes, that all inputs with heads agree on."""
        found: set[Spread] = set()
        for value in values:
            if value is not None and value in self.spreads:
                spread = self.spreads[value]
                found.add(Spread(spread.axis + rank - len(shape_of(value)), spread.owner))
        if len(found) != 1:
            raise HeadsMix("its operands have their heads in different places")
        return next(iter(found))

    def _elementwise(self, node: ir.Node, proto: onnx.NodeProto) -> None:
        rank = len(shape_of(node.outputs[0]))
        spread = self._aligned(node, rank, node.inputs)
        for i, value in enumerate(node.inputs):
            if value is None or value in self.spreads:
                continue
            axis = spread.axis - rank + len(shape_of(value))
            if axis < 0 or shape_of(value)[axis] == 1:
                continue
            if not self.view.is_const(value):
                raise HeadsMix(f"{value.name!r} has entries for each head, but does not come from the operands")
            proto.input[i] = self.cut(value, spread, axis)
        self._give(node, spread)

    def _reduce(self, node: ir.Node) -> None:
        spread = self._only(node)
        rank = len(shape_of(node.inputs[0]))  # type: ignore[arg-type]
        if "axes" in node.attributes:
            axes = attribute_ints(node, "axes") or []
        else:
            axes = self._const_ints(node.inputs[1] if len(node.inputs) > 1 else None)
        axes = [a % rank for a in axes]
        if spread.axis in axes or not axes:
            raise HeadsMix("it reduces over the heads")
        dropped = 0 if attribute_int(node, "keepdims", 1) else sum(1 for a in axes if a < spread.axis)
        self._give(node, Spread(spread.axis - dropped, spread.owner))

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

    def _on_softmax(self, node: ir.Node, proto: onnx.NodeProto) -> None:
        spread = self._only(node)
        if attribute_int(node, "axis", -1) % len(shape_of(node.outputs[0])) == spread.axis:
            raise HeadsMix("it runs over the heads")
        self._give(node, spread)

    def _on_attention(self, node: ir.Node, proto: onnx.NodeProto) -> None:
        spread = self._aligned(node, 4, node.inputs[:3])
        if spread.axis != 1 or any(v not in self.spreads for v in node.inputs[:3]) or len(node.outputs) > 1:
            raise HeadsMix("its operands have their heads in different places")
        for value in node.inputs[3:]:
            if value is not None and (value in self.spreads or (len(shape := shape_of(value)) > 3 and shape[-3] != 1)):
                raise HeadsMix("a mask with entries for each head")
        self._give(node, spread)

    def _on_gemm(self, node: ir.Node, proto: onnx.NodeProto) -> None:
        self._projection(node, proto, 0 if attribute_int(node, "transB", 0) else 1)

    def _projection(self, node: ir.Node, proto: onnx.NodeProto, columns: int) -> None:
        """A layer whose weight, a parameter, has columns for each head."""
        weight = node.inputs[1]
        if weight is None or node.inputs[0] in self.spreads or len(node.inputs) > 2:
            raise HeadsMix("it multiplies over the heads")
        spread = self.spreads[weight]
        if spread.axis != columns:
            raise HeadsMix("it multiplies over the heads")
        proto.input[1] = self.cut(weight, spread, columns)
        self._give(node, Spread(len(shape_of(node.outputs[0])) - 1, spread.owner))

    def _on_matmul(self, node: ir.Node, proto: onnx.NodeProto) -> None:
        rank = len(shape_of(node.outputs[0]))
        if node.inputs[1] in self.spreads and node.inputs[1] in self.parameters:
            self._projection(node, proto, 1)
            return
        spread = self._aligned(node, rank, node.inputs)
        if spread.axis >= rank - 2:
            raise HeadsMix("it multiplies over the heads")
        for i, value in enumerate(node.inputs):
            if value is None or value in self.spreads:
                continue
            axis = spread.axis - rank + len(shape_of(value))
            if axis >= 0 and shape_of(value)[axis] != 1:
                if not self.view.is_const(value):
                    raise HeadsMix(f"{value.name!r} has entries for each head, but does not come from the operands")
                proto.input[i] = self.cut(value, spread, axis)
        self._give(node, spread)

    def _on_cumsum(self, node: ir.Node, proto: onnx.NodeProto) -> None:
        spread = self._only(node)
        axis = self._const_ints(node.inputs[1])[0] % len(shape_of(node.outputs[0]))
        if axis == spread.axis:
            raise HeadsMix("it sums over the heads")
        self._give(node, spread)

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
        for i, value in enumerate(node.inputs):
            if value is not None and value not in self.spreads:
                if not self.view.is_const(value):
                    raise HeadsMix(f"{value.name!r} does not come from the operands")
                proto.input[i] = self.cut(value, spread, spread.axis)
        self._give(node, spread)

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

    def _on_conv(self, node: ir.Node, proto: onnx.NodeProto) -> None:
        spread = self._only(node)
        if spread.axis != 1 or not self.view.is_depthwise(node):
            raise HeadsMix("it mixes channels")
        for i in range(1, len(node.inputs)):
            value = node.inputs[i]
            if value is not None:
                proto.input[i] = self.cut(value, spread, 0)
        for attribute in proto.attribute:
            if attribute.name == "group":
                attribute.i = self.kept_count(spread)
        self._give(node, spread)

    def _on_scatterelements(self, node: ir.Node, proto: onnx.NodeProto) -> None:
        rank = len(shape_of(node.outputs[0]))
        spread = self._aligned(node, rank, node.inputs)
        if attribute_int(node, "axis", 0) % rank == spread.axis:
            raise HeadsMix("it scatters over the heads")
        for i, value in enumerate(node.inputs):
            if value is not None and value not in self.spreads:
                if not self.view.is_const(value):
                    raise HeadsMix(f"{value.name!r} does not come from the operands")
                proto.input[i] = self.cut(value, spread, spread.axis)
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

    def _on_einsum(self, node: ir.Node, proto: onnx.NodeProto) -> None:
        equation = attribute_string(node, "equation", "").replace(" ", "")
        if "->" not in equation or "." in equation:
            raise HeadsMix("an equation without an explicit result")
        left, right = equation.split("->")
        terms = left.split(",")
        letters = {
            (terms[i][self.spreads[v].axis], self.spreads[v].owner)
            for i, v in enumerate(node.inputs)
            if v is not None and v in self.spreads
        }
        if len(letters) != 1:
            raise HeadsMix("its operands have their heads in different places")
        letter, owner = next(iter(letters))
        if letter not in right:
            raise HeadsMix("it sums over the heads")
        for i, value in enumerate(node.inputs):
            if value is not None and value not in self.spreads and letter in terms[i]:
                if not self.view.is_const(value):
                    raise HeadsMix(f"{value.name!r} does not come from the operands")
                proto.input[i] = self.cut(value, Spread(0, owner), terms[i].index(letter))
        self._give(node, Spread(right.index(letter), owner))


def _same_for_all(array: np.ndarray, spread: Spread, axis: int) -> bool:
    """Is each head's part of the constant the same?"""
    if array.ndim == 0 or array.shape[axis] != len(spread.owner):
        return True
    owner = np.array(spread.owner)
    parts = [np.take(array, np.flatnonzero(owner == h), axis=axis) for h in dict.fromkeys(spread.owner)]
    return all(p.shape == parts[0].shape and np.array_equal(p, parts[0]) for p in parts[1:])
