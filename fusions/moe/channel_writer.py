"""Writes the nodes of a block anew with some of its channels only: what every rule of ``channels.py`` needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import onnx
import onnx_ir as ir
from onnx import helper, numpy_helper

from ..graph import GraphView, attribute_int, is_op, rank_of, static_dims
from ..proof.spread import HeadsMix


@dataclass(frozen=True)
class Kept:
    """The indices of an axis that stay, of how many."""

    indices: tuple[int, ...]
    size: int


#: For a value: which of its axes are cut, and to what.
Kinds = dict[int, Kept]


class ChannelWriter:
    """Cut constants, cut operands, and shapes that count channels.

    Args:
        view: the graph.
        given: cuts of the region's inputs and of the constants behind the op's parameters.
        constants: the cut arrays of those constants.
    """

    def __init__(
        self, view: GraphView, given: dict[ir.Value, Kinds], constants: Callable[[ir.Value], np.ndarray]
    ) -> None:
        self.view = view
        self.kinds: dict[ir.Value, Kinds] = dict(given)
        self.protos: list[onnx.NodeProto] = []
        self.tensors: dict[str, onnx.TensorProto] = {}
        self._counted: dict[ir.Value, list[Kept | None]] = {}
        for value in given:
            if value.const_value is not None:
                array = np.ascontiguousarray(constants(value))
                self.tensors[value.name or ""] = numpy_helper.from_array(array, value.name or "")

    # --- what is written --------------------------------------------------------------------------------------------

    def _tensor(self, array: np.ndarray) -> str:
        name = f"cut__{len(self.tensors)}"
        self.tensors[name] = numpy_helper.from_array(np.ascontiguousarray(array), name)
        return name

    def _ints(self, numbers: Iterable[int]) -> str:
        return self._tensor(np.array(list(numbers), np.int64))

    def _write(self, node: ir.Node, inputs: dict[int, str] | None = None, drop: tuple[str, ...] = ()) -> None:
        proto = ir.serde.serialize_node(node)
        for place, name in (inputs or {}).items():
            while len(proto.input) <= place:
                proto.input.append("")
            proto.input[place] = name
        kept = [a for a in proto.attribute if a.name not in drop]
        del proto.attribute[:]
        proto.attribute.extend(kept)
        self.protos.append(proto)

    def _want(self, value: ir.Value, axis: int, kept: Kept) -> str:
        """The value's name, cut along an axis as others are: it has one entry there, is cut so, or is cut now."""
        own = self.kinds.get(value, {})
        dims = static_dims(value)
        if dims is None or axis < 0:
            raise HeadsMix(f"the shape of {value.name!r} is not known")
        if own.get(axis) == kept or (dims[axis] == 1 and axis not in own):
            return value.name or ""
        if axis in own or dims[axis] != kept.size:
            raise HeadsMix(f"{value.name!r} has other channels than what it meets")
        name = f"{value.name}__cut{len(self.protos)}"
        self.protos.append(helper.make_node("Gather", [value.name or "", self._ints(kept.indices)], [name], axis=axis))
        if own:
            raise HeadsMix(f"{value.name!r} is cut along two axes at once")
        return name

    # --- shapes -----------------------------------------------------------------------------------------------------

    def shape_step(self, node: ir.Node) -> bool:
        """`Shape` of a cut value counts the channels that are left, and so does what is made from it."""
        source = node.inputs[0] if node.inputs else None
        if is_op(node, "Shape") and source is not None:
            kinds, rank = self.kinds.get(source, {}), rank_of(source)
            if kinds and rank is not None:
                line: list[Kept | None] = [kinds.get(i) for i in range(rank)]
                start, end = attribute_int(node, "start", 0), attribute_int(node, "end", rank)
                self._counted[node.outputs[0]] = line[start:end]
            self._write(node)
            return True
        read = [v for v in node.inputs if v is not None and any(self._counted.get(v, ()))]
        if not read:
            return False
        if is_op(node, "Expand", "ConstantOfShape") and read == [node.inputs[-1]]:
            line = self._counted[read[0]]
            if is_op(node, "Expand") and source is not None:
                shift = len(line) - (rank_of(source) or 0)
                own = {a + shift: k for a, k in self.kinds.get(source, {}).items()}
                if own and (shift < 0 or any(line[a] != k for a, k in own.items())):
                    raise HeadsMix("an expansion of channels to a computed shape")
            self.kinds[node.outputs[0]] = {i: k for i, k in enumerate(line) if k is not None}
            self._write(node)
            return True
        if is_op(node, "Cast", "Identity"):
            self._counted[node.outputs[0]] = self._counted[read[0]]
            self._write(node)
            return True
        if is_op(node, "Gather", "Slice") and all(v is None or self.view.is_const(v) for v in node.inputs[1:]):
            line, picked = self._counted[read[0]], None
            if node.op_type == "Gather":
                index = self.view.array(node.inputs[1])
                picked = None if index is None else [line[int(i)] for i in index.reshape(-1)]
            else:
                bounds = [self.view.ints(v) for v in node.inputs[1:3]]
                picked = line[bounds[0][0] : bounds[1][0]] if bounds[0] and bounds[1] else None
            if picked is not None:
                if any(picked):
                    self._counted[node.outputs[0]] = picked
                self._write(node)
                return True
        raise HeadsMix(f"{node.op_type} {node.name!r} computes a shape with channels")
