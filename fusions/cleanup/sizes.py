"""Sizes that a graph computes although its shapes tell them.

A `Reshape` of `[B, T, 36]` to `[B, T, -1, 12]` makes three of the open size. onnx's inference gives it a new name, as
PyTorch's older exporter does, and numbers of heads are unknown then.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import onnx_ir as ir

from ..dims import symbol
from ..graph import GraphView, attribute_int, is_op
from ..passes import Pass
from ..result import PassReport
from .constants import FoldConstants
from .infer import infer_open, look

#: What one size tells may tell another.
ROUNDS = 4


class SpellSizes(Pass):
    """Say the open sizes of reshaped values that their inputs tell, fold what they make constant, and repeat."""

    name = "spell-sizes"
    needs = frozenset({"folded"})

    def run(self, model: ir.Model, report: PassReport) -> None:
        infer_open(model)
        for _ in range(ROUNDS):
            before = look(model)
            told: dict[str, int | ir.SymbolicDim] = {}
            view = GraphView(model.graph)
            for node in model.graph:
                if is_op(node, "Reshape"):
                    told |= _open_size(node)
                elif is_op(node, "Range"):
                    told |= _counted(view, node)
            for node in model.graph if told else ():
                for value in node.outputs:
                    _put(value, told)
            folded = PassReport("")
            FoldConstants().run(model, folded)
            if not told and not folded.matched:
                break
            report.matched += len(told) + folded.matched
            infer_open(model)
            if look(model) == before:
                break
        report.changed = report.matched > 0


def _open_size(node: ir.Node) -> dict[str, int | ir.SymbolicDim]:
    """The one size of the result that the input's sizes give a number, or another name, by its name."""
    source, result = node.inputs[0], node.outputs[0]
    if source is None or source.shape is None or result.shape is None:
        return {}
    before, after = list(source.shape), list(result.shape)
    for dim in list(before):
        if not isinstance(dim, int) and dim in after:
            before.remove(dim)
            after.remove(dim)
    names = [symbol(d) for d in after if not isinstance(d, int)]
    numbers = [d for d in before if isinstance(d, int)]
    if len(names) != 1 or names[0] is None or not names[0].isidentifier():
        return {}
    whole, rest = math.prod(numbers), math.prod(d for d in after if isinstance(d, int))
    if len(numbers) < len(before):
        named = [d for d in before if not isinstance(d, int)]
        alike = len(named) == 1 and symbol(named[0]) is not None and whole == rest and whole > 0
        return {names[0]: named[0]} if alike and names[0].startswith("unk__") else {}
    return {names[0]: whole // rest} if rest and whole and whole % rest == 0 else {}


def _counted(view: GraphView, node: ir.Node) -> dict[str, int | ir.SymbolicDim]:
    """How many numbers there are from a start up to that and a size more, by the name of the result's open size."""
    start, limit, step = node.inputs
    result = node.outputs[0]
    name = None if result.shape is None or len(result.shape) != 1 else symbol(result.shape[0])
    if start is None or limit is None or name is None or not name.startswith("unk__") or view.scalar(step) != 1:
        return {}
    first, last = _uncast(start), _uncast(limit)
    total = last.producer()
    if view.scalar(first) == 0:
        size = _size(view, last)
    elif total is not None and is_op(total, "Add"):
        more = [v for v in total.inputs if v is not None and _uncast(v) is not first]
        size = _size(view, more[0]) if len(more) == 1 else None
    else:
        size = None
    return {} if size is None else {name: size}


def _size(view: GraphView, value: ir.Value) -> int | ir.SymbolicDim | None:
    """The size that a number is, where it was read of a shape."""
    value = _uncast(value)
    node = value.producer()
    if node is None or not is_op(node, "Gather", "Squeeze") or node.inputs[0] is None:
        return None
    shape = node.inputs[0].producer()
    source = None if shape is None or not is_op(shape, "Shape") else shape.inputs[0]
    if shape is None or source is None or source.shape is None:
        return None
    rank = len(source.shape)
    axes = range(rank)[slice(attribute_int(shape, "start", 0), attribute_int(shape, "end", rank))]
    if is_op(node, "Gather"):
        place = view.ints(node.inputs[1])
        if not place or len(place) != 1 or not -len(axes) <= place[0] < len(axes):
            return None
        axes = axes[place[0] % len(axes) :][:1]
    if len(axes) != 1:
        return None
    dim = source.shape[axes[0]]
    return dim if isinstance(dim, int) or symbol(dim) is not None else None


def _uncast(value: ir.Value) -> ir.Value:
    """A whole number before it was cast to another type of them, or moved as a whole."""
    while (node := value.producer()) is not None and node.inputs and (source := node.inputs[0]) is not None:
        whole = is_op(node, "Cast") and source.dtype in (ir.DataType.INT32, ir.DataType.INT64)
        if not whole and not is_op(node, "Identity"):
            break
        value = source
    return value


def _put(value: ir.Value, told: Mapping[str, int | ir.SymbolicDim]) -> None:
    """Numbers, or better names, for names in a value's shape; what the model promises of its outputs stays."""
    if value.shape is None or value.is_graph_output():
        return
    dims = [told.get(symbol(d) or "", d) for d in value.shape]
    if dims != list(value.shape):
        value.shape = ir.Shape(dims)
