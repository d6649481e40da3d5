"""What all readers of a block share: the nodes that were understood, data-moving steps, zeros and ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numpy as np
import onnx_ir as ir

from ..graph import FLOAT_TYPES, INTEGER_TYPES, GraphView, attribute_float, attribute_int, is_op, static_dims

R = TypeVar("R")

#: Steps that move elements, copy them or change their type.
MOVES = ("Cast", "CastLike", "Expand", "Flatten", "Identity", "Reshape", "Squeeze", "Tile", "Transpose", "Unsqueeze")
#: Steps that do nothing to a single operand.
_OF_ONE = ("Concat", "Max", "Mean", "Min", "Sum")


class Marks:
    """Nodes that were understood, in the order in which they were met, so that a failed reading can be taken back."""

    def __init__(self) -> None:
        self._nodes: dict[ir.Node, None] = {}

    def __contains__(self, node: ir.Node) -> bool:
        return node in self._nodes

    def add(self, node: ir.Node) -> None:
        self._nodes[node] = None

    def level(self) -> int:
        """To come back to with :meth:`back`."""
        return len(self._nodes)

    def back(self, level: int) -> None:
        """Forget what was added since."""
        while len(self._nodes) > level:
            self._nodes.popitem()

    def all(self) -> frozenset[ir.Node]:
        return frozenset(self._nodes)

    def narrowing(self) -> ir.Node | None:
        """A cast among them from a wider float type to one of 16 bits."""
        half = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
        for node in self._nodes:
            if is_op(node, "Cast", "CastLike") and node.outputs[0].dtype in half:
                source = node.inputs[0]
                if source is not None and source.dtype in FLOAT_TYPES and source.dtype not in half:
                    return node
        return None


class Reader:
    """Reads a block from its end. Every node that a reading passes is marked: it is known in closed form.

    Attributes:
        marks: the nodes understood so far.
        why: why readings were given up, the latest last.
    """

    def __init__(self, view: GraphView) -> None:
        self.view = view
        self.marks = Marks()
        self.why: list[str] = []

    def attempt(self, function: Callable[..., R | None], *arguments: object) -> R | None:
        """Call a reading; what it marked counts only if it succeeds."""
        level = self.marks.level()
        found = function(self, *arguments)
        if found is None:
            self.marks.back(level)
        return found

    def refuse(self, reason: str) -> None:
        """Note why a reading is given up."""
        self.why.append(reason)

    def node(self, value: ir.Value | None, *op_types: str) -> ir.Node | None:
        """The value's node, marked, when it is one of these ops and computed at run time."""
        producer = None if value is None else value.producer()
        if producer is None or value is None or self.view.is_const(value) or not is_op(producer, *op_types):
            return None
        self.marks.add(producer)
        return producer

    def moved(self, value: ir.Value | None) -> ir.Value | None:
        """The value before data-moving steps. A cast to another kind of number is none."""
        while value is not None:
            step = self._step(value)
            if step is None:
                return value
            self.marks.add(step)
            value = step.inputs[0]
        return None

    def _step(self, value: ir.Value) -> ir.Node | None:
        """The node that moved a value here."""
        producer = value.producer()
        if producer is None or self.view.is_const(value):
            return None
        one = is_op(producer, *_OF_ONE) and len(producer.inputs) == 1
        if not is_op(producer, *MOVES) and not one and not takes_the_only_one(self.view, producer):
            return None
        source = producer.inputs[0]
        if source is None or (producer.op_type in ("Cast", "CastLike") and not _same_kind(source, value)):
            return None
        return producer

    def is_move(self, node: ir.Node) -> bool:
        """Does a node move data in a way that no computed number has a say in?"""
        rest = [v for v in node.inputs[1:] if v is not None]
        one = is_op(node, *_OF_ONE) and not rest
        return one or (is_op(node, *MOVES) and all(self.view.is_const(v) for v in rest))

    def trail(self, value: ir.Value) -> list[ir.Value]:
        """The value and those that it was moved from, latest first; marks nothing."""
        found = [value]
        while (step := self._step(found[-1])) is not None:
            assert step.inputs[0] is not None
            found.append(step.inputs[0])
        return found

    def factors(self, value: ir.Value | None) -> list[ir.Value]:
        """The factors of a product of products."""
        producer = self.node(value, "Mul")
        if producer is None:
            return [] if value is None else [value]
        return [f for operand in producer.inputs for f in self.factors(operand)]

    def terms(self, value: ir.Value | None) -> list[ir.Value]:
        """The terms of a sum of sums, data-moving steps between them aside, the first one first."""
        found: list[ir.Value] = []
        stack = [value]
        while stack:
            base = self.moved(stack.pop())
            producer = self.node(base, "Add", "Sum")
            if producer is not None:
                stack.extend(reversed(producer.inputs))
            elif base is not None:
                found.append(base)
        return found

    def filled(self, value: ir.Value | None) -> float | None:
        """The number that a tensor is filled with: a constant, `ConstantOfShape`, an expanded scalar."""
        if value is None:
            return None
        array = self.view.array(value)
        if array is not None:
            flat = array.reshape(-1)
            return float(flat[0]) if flat.size and bool(np.all(flat == flat[0])) else None
        producer = self.node(
            value,
            "ConstantOfShape",
            "Expand",
            "Cast",
            "CastLike",
            "Identity",
            "Reshape",
            "Unsqueeze",
            "Tile",
            "Transpose",
        )
        if producer is None:
            return None
        if producer.op_type == "ConstantOfShape":
            attribute = producer.attributes.get("value")
            return 0.0 if attribute is None else float(attribute.as_tensor().numpy().reshape(-1)[0])
        return self.filled(producer.inputs[0])

    def is_filled(self, value: ir.Value | None, number: float) -> bool:
        """Is a tensor filled with this number?"""
        level = self.marks.level()
        if self.filled(value) == number:
            return True
        self.marks.back(level)
        return False

    def scalar(self, value: ir.Value | None) -> float | None:
        """The one element of a constant."""
        return self.view.scalar(value)

    def axes(self, node: ir.Node) -> list[int] | None:
        """The axes of a reduction, squeeze or unsqueeze, as the node has them."""
        if "axes" in node.attributes:
            return list(node.attributes["axes"].as_ints())
        return self.view.ints(node.inputs[1]) if len(node.inputs) > 1 else None

    def reduces(self, node: ir.Node, axis: int) -> bool:
        """Whether a reduction goes over this one axis alone, counted from the end."""
        axes, source = self.axes(node), node.inputs[0]
        rank = len(source.shape) if source is not None and source.shape is not None else 0
        return axes is not None and rank > 0 and [a % rank for a in axes] == [rank + axis]

    def bounds(self, node: ir.Node) -> tuple[float, float]:
        """The least and the largest result of `Clip`, `Min` or `Max` with constants; infinite where there is none."""
        inputs = list(node.inputs)
        low, high = -float("inf"), float("inf")
        if node.op_type == "Clip":
            if "min" in node.attributes or "max" in node.attributes:
                return attribute_float(node, "min", low), attribute_float(node, "max", high)
            given = [self.scalar(v) if v is not None else None for v in [*inputs[1:3], None, None][:2]]
            if any(v is not None and g is None for v, g in zip(inputs[1:3], given, strict=False)):
                return float("nan"), float("nan")
            return (low if given[0] is None else given[0]), (high if given[1] is None else given[1])
        bound = next((s for s in map(self.scalar, inputs) if s is not None), float("nan"))
        return (low, bound) if node.op_type == "Min" else (bound, high)

    def bounded(self, value: ir.Value | None) -> tuple[ir.Value | None, float, float]:
        """(x, low, high) of a value that is x bounded from one or both sides."""
        low, high = -float("inf"), float("inf")
        while (node := self.node(value, "Clip", "Min", "Max")) is not None:
            if node.op_type != "Clip" and len(node.inputs) != 2:
                return None, low, high
            below, above = self.bounds(node)
            if not below <= above:
                return None, low, high
            low, high = min(max(low, below), high), max(min(high, above), low)
            value = next((v for v in node.inputs if v is not None and not self.view.is_const(v)), None)
        return value, low, high


def takes_the_only_one(view: GraphView, node: ir.Node) -> bool:
    """Is it ``x[:, 0]`` where that axis has one entry?"""
    data = node.inputs[0] if is_op(node, "Gather") else None
    dims = None if data is None else static_dims(data)
    return dims is not None and dims[attribute_int(node, "axis", 0)] == 1 and view.scalar(node.inputs[1]) in (0, -1)


def _same_kind(source: ir.Value, value: ir.Value) -> bool:
    """Does a cast lead from floats to floats, or between integers that hold any expert's number?"""
    if source.dtype == value.dtype:
        return True
    kinds = {None if v.dtype is None or v.dtype in FLOAT_TYPES else v.dtype for v in (source, value)}
    return kinds == {None} or kinds <= INTEGER_TYPES


def last_dim(value: ir.Value | None) -> int | None:
    """The size of the last axis where it is known."""
    if value is None or value.shape is None or len(value.shape) == 0:
        return None
    dim = value.shape[-1]
    return dim if isinstance(dim, int) else None
