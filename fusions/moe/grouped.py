"""Grouped matrix products as transformers' exporter writes them out.

Choices are sorted by expert; a histogram of the ids gives where each expert's rows end; each expert multiplies its
rows; the rows are weighted, brought back to the order of the choices and summed. Every step is checked for what it is,
and the histogram's arithmetic is run for each expert's number.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from ..graph import INTEGER_TYPES, attribute_int, attribute_string
from .forms import Routed, linears
from .linear import Linear, read_bias, read_linear
from .mlp import read_mlp
from .reader import Reader
from .router import Router
from .stored import STACKED, Part, Seen
from .weights import is_ids, read_weighting


@dataclass(frozen=True)
class _Sorted:
    """Choices sorted by expert."""

    ids: ir.Value
    order: ir.Value


def read_grouped(r: Reader, router: Router, value: ir.Value) -> Routed | None:
    """The weighted sum over choices of rows that were sorted by expert and brought back."""
    total = r.node(r.moved(value), "ReduceSum")
    axes = None if total is None else r.axes(total)
    if total is None or axes is None or len(axes) != 1:
        return None
    back = r.node(r.moved(total.inputs[0]), "GatherND", "Gather")
    if back is None:
        return None
    chosen = r.attempt(_inverse, router, back.inputs[1])
    product = r.node(back.inputs[0], "Mul")
    if chosen is None or product is None:
        return None
    reading = _Grouped(router, chosen)
    for rows, weights in (product.inputs, product.inputs[::-1]):
        taken = r.node(r.moved(weights), "GatherND", "Gather")
        if taken is None or r.moved(taken.inputs[1]) is not chosen.order:
            continue
        mlp = r.attempt(read_mlp, rows, reading.linear)
        if mlp is None or mlp.factors or any(x.expert is None for x in linears(mlp)):
            continue
        weighting = read_weighting(r, router, taken.inputs[0])
        inputs = [_tokens(r, router, chosen, x.x) for x in linears(mlp)[1:]]
        if weighting is None or any(x is None for x in inputs):
            continue
        return Routed("grouped", (mlp,), weighting, tuple(x for x in inputs if x is not None))
    return None


def _inverse(r: Reader, router: Router, value: ir.Value | None) -> _Sorted | None:
    """The sorting order behind an index that undoes it."""
    node = r.node(r.moved(value), "ScatterND", "ScatterElements", "TopK")
    if node is None:
        return None
    if node.op_type == "TopK":
        # sorting the order itself
        order = _order(r, router, node.inputs[0])
        ascending = attribute_int(node, "largest", 1) == 0 and r.moved(value) is node.outputs[1]
        return order if ascending and _whole(r, node) else None
    if attribute_string(node, "reduction", "none") != "none" or not _counting(r, node.inputs[2]):
        return None
    r.filled(node.inputs[0])  # every entry is written
    return _order(r, router, node.inputs[1])


def _order(r: Reader, router: Router, value: ir.Value | None) -> _Sorted | None:
    """Ids sorted, lowest first, and the order that sorts them."""
    index = r.moved(value)
    node = r.node(index, "TopK")
    if node is None or index is not node.outputs[1] or attribute_int(node, "largest", 1) != 0:
        return None
    if attribute_int(node, "sorted", 1) != 1 or not is_ids(r, router, node.inputs[0]) or not _whole(r, node):
        return None
    return _Sorted(node.outputs[0], node.outputs[1])


def _whole(r: Reader, node: ir.Node) -> bool:
    """Does a `TopK` sort all of a list? Its count is the list's length, or a number equal to it."""
    count, shape = node.inputs[1], None if node.inputs[0] is None else node.inputs[0].shape
    number = r.scalar(count)
    if number is not None:
        return shape is not None and len(shape) == 1 and shape[0] == int(number)
    base = r.moved(count)
    while (step := r.node(base, "Gather", "Slice")) is not None:
        base = r.moved(step.inputs[0])
    size = r.node(base, "Shape", "Size")
    return size is not None and r.moved(size.inputs[0]) is r.moved(node.inputs[0])


def _counting(r: Reader, value: ir.Value | None) -> bool:
    """Is it 0, 1, 2, ...?"""
    array = None if value is None else r.view.array(value)
    if array is not None:
        return bool(np.array_equal(array.reshape(-1), np.arange(array.size)))
    node = r.node(r.moved(value), "Range")
    return node is not None and r.scalar(node.inputs[0]) == 0 and r.scalar(node.inputs[2]) == 1


def _tokens(r: Reader, router: Router, chosen: _Sorted, value: ir.Value) -> ir.Value | None:
    """The tokens that rows in sorted order were taken from: choice number divided by the choices of a token."""
    node = r.node(r.moved(value), "GatherND", "Gather")
    if node is None or not _floor_divided(r, node.inputs[1], chosen.order, router.top_k):
        return None
    return node.inputs[0]


def _floor_divided(r: Reader, value: ir.Value | None, order: ir.Value, by: int) -> bool:
    base = r.moved(value)
    node = r.node(base, "Div", "Sub", "Floor")
    if node is None:
        return False
    if node.op_type == "Div":
        return r.moved(node.inputs[0]) is order and r.scalar(node.inputs[1]) == by
    if node.op_type == "Floor":
        return _floor_divided(r, node.inputs[0], order, by)
    # the quotient less one where a negative number left a remainder, which no choice's number does
    return _floor_divided(r, node.inputs[0], order, by) and _never(r, node.inputs[1], order)


def _never(r: Reader, value: ir.Value | None, order: ir.Value) -> bool:
    """Zero wherever a number is not negative: a conjunction with ``number < 0`` in it."""
    base: ir.Value | None = value
    while (node := r.node(base, "Cast", "And", "Equal", "Mod", "Less")) is not None:
        if node.op_type == "Less":
            return r.moved(node.inputs[0]) is order and r.scalar(node.inputs[1]) == 0
        if node.op_type == "And":
            found = [r.attempt(_never_or_none, v, order) for v in node.inputs]
            remainder = [r.attempt(_remainder, v, order) for v in node.inputs]
            return (found[0] is not None and remainder[1] is not None) or (
                found[1] is not None and remainder[0] is not None
            )
        if node.op_type == "Equal":
            number = r.view.array(node.inputs[1])
            if number is None or not bool(np.all(number)):
                return False
        base = node.inputs[0]
    return False


def _never_or_none(r: Reader, value: ir.Value | None, order: ir.Value) -> bool | None:
    return True if _never(r, value, order) else None


def _remainder(r: Reader, value: ir.Value | None, order: ir.Value) -> bool | None:
    node = r.node(value, "Cast")
    node = None if node is None else r.node(node.inputs[0], "Mod")
    return True if node is not None and r.moved(node.inputs[0]) is order else None


def _counts_far(r: Reader, value: ir.Value | None) -> bool:
    """Can it count choices, moved or cast as it is? 16 bits count to 2048 or less, 8 to 255."""
    return value is not None and all(v.dtype in (ir.DataType.FLOAT, *INTEGER_TYPES) for v in r.trail(value))


class _Grouped:
    """Reads the projections: for each expert its rows times its weights, joined."""

    def __init__(self, router: Router, chosen: _Sorted) -> None:
        self.router, self.chosen = router, chosen

    def linear(self, r: Reader, value: ir.Value | None) -> Linear | None:
        add = r.node(value, "Add")
        if add is None:
            return self._rows(r, value)
        for base, bias in (add.inputs, add.inputs[::-1]):
            layer = None if base is None or bias is None else r.attempt(self._rows_of, base)
            found = None if layer is None or bias is None else read_bias(r, layer, bias)
            if layer is not None and found is not None and found.ids is not None and value is not None:
                # each row's own expert's, by the sorted numbers
                return replace(layer, y=value, bias=found) if r.moved(found.ids) is self.chosen.ids else None
        return None

    def _rows_of(self, r: Reader, value: ir.Value | None) -> Linear | None:
        return self._rows(r, r.moved(value))

    def _rows(self, r: Reader, value: ir.Value | None) -> Linear | None:
        node = r.node(value, "Concat")
        if node is None or value is None or len(node.inputs) != self.router.experts or attribute_int(node, "axis", 0):
            return None
        parts: list[Part] = []
        first: Linear | None = None
        source: ir.Value | None = None
        before: ir.Value | None = None
        for expert, rows in enumerate(node.inputs):
            layer = read_linear(r, rows)
            if layer is None or layer.expert is not None or layer.ids is not None or layer.bias is not None:
                return None
            gather = r.node(layer.x, "Gather", "Slice")
            if gather is None or attribute_int(gather, "axis", 0) != 0:
                return None
            end = self._range(r, gather.inputs[1], expert, before)
            if end is None or len(layer.seen.parts) != 1:
                return None
            if first is None:
                first, source = layer, gather.inputs[0]
            same = layer.seen.axes == first.seen.axes and (layer.out, layer.into) == (first.out, first.into)
            if not same or gather.inputs[0] is not source:
                return None
            parts.append(layer.seen.parts[0])
            before = end
        if first is None or source is None:
            return None
        seen = Seen(tuple(parts), (STACKED, *first.seen.axes))
        return Linear(source, value, seen, 0, first.out + 1, first.into + 1, None, -1)

    def _range(self, r: Reader, index: ir.Value | None, expert: int, before: ir.Value | None) -> ir.Value | None:
        """Where an expert's rows end; they must begin where the last one's ended."""
        node = r.node(index, "Range")
        if node is None or r.scalar(node.inputs[2]) != 1:
            return None
        start, end = node.inputs[0], r.moved(node.inputs[1])
        starts = r.scalar(start) == 0 if expert == 0 else r.moved(start) is before
        if not starts or end is None or not self._end(r, end, expert):
            return None
        return end

    def _end(self, r: Reader, value: ir.Value, expert: int) -> bool:
        node = r.node(value, "Split", "Gather")
        if node is None:
            return False
        if node.op_type == "Split":
            if len(node.outputs) != self.router.experts or list(node.outputs).index(value) != expert:
                return False
        elif r.scalar(node.inputs[1]) != expert:
            return False
        total = r.node(r.moved(node.inputs[0]), "CumSum")
        if total is None or attribute_int(total, "exclusive", 0) or attribute_int(total, "reverse", 0):
            return False
        if not (_counts_far(r, value) and _counts_far(r, node.inputs[0]) and _counts_far(r, total.inputs[0])):
            return False
        return self._counts(r, r.moved(total.inputs[0]))

    def _counts(self, r: Reader, value: ir.Value | None) -> bool:
        """How many choices each expert has: ones added up at the bins of the sorted ids."""
        base: ir.Value | None = value
        while base is not None and (cast := r.node(base, "Cast")) is not None:
            if not _counts_far(r, base):
                return False
            base = cast.inputs[0]
        node = r.node(base, "ScatterElements")
        if node is None or attribute_string(node, "reduction", "none") != "add":
            return False
        if not r.is_filled(node.inputs[0], 0.0) or not r.is_filled(node.inputs[2], 1.0):
            return False
        if not _counts_far(r, node.outputs[0]):
            return False
        bins = self._bins(r, node.inputs[1])
        return bins is not None and bool(np.array_equal(bins, np.arange(self.router.experts)))

    def _bins(self, r: Reader, value: ir.Value | None) -> np.ndarray | None:
        """The bins of ids 0, 1, ..., E - 1, by running the arithmetic that makes them."""
        base = r.moved(value)
        if base is self.chosen.ids or base is self.router.ids:
            return np.arange(self.router.experts, dtype=np.int64)
        node = r.node(base, "Cast", "Clip", "Div", "Mul", "Floor", "Min", "Max")
        if node is None or base is None:
            return None
        if node.op_type in ("Clip", "Min", "Max"):
            low, high = r.bounds(node)
            inner = self._bins(r, next((v for v in node.inputs if v is not None and not r.view.is_const(v)), None))
            if inner is None or math.isnan(low) or math.isnan(high):
                return None
            return np.minimum(np.maximum(inner, low), high).astype(inner.dtype)
        inner = self._bins(r, node.inputs[0])
        if inner is None:
            return None
        if node.op_type == "Cast":
            return np.trunc(inner).astype(ir.DataType(node.attributes["to"].as_int()).numpy())
        if node.op_type == "Floor":
            return np.floor(inner)
        number = r.view.array(node.inputs[1])
        if number is None or number.size != 1:
            return None
        scalar = number.reshape(-1)[0]
        return (inner / scalar if node.op_type == "Div" else inner * scalar).astype(number.dtype)
