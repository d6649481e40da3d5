"""Values in closed form: constants, sizes and given integers, and how a graph is walked through."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ..graph import GraphView, attribute_int, is_op
from .elements import (
    Choice,
    Element,
    Tensor,
    Unknown,
    Vec,
    choose,
    literal,
    put,
    settled,
    truth,
)
from .linear import Cond, Lin, Look, axis, of_dim, simplify


class Evaluator:
    """Evaluates values of one graph; what a node makes is found by the method that its kind names."""

    def __init__(self, view: GraphView) -> None:
        self.view = view
        self._known: dict[ir.Value, Tensor | None] = {}
        self._nodes: dict[ir.Value, set[ir.Node]] = {}

    def __call__(self, value: ir.Value | None) -> Tensor:
        """The value in closed form.

        Raises:
            Unknown: there is none.
        """
        if value is None:
            raise Unknown("nothing")
        if value not in self._known:
            self._known[value] = None
            try:
                self._known[value] = settled(self._evaluate(value))
            except (Unknown, IndexError, KeyError, ValueError):
                self._known[value] = None
        found = self._known[value]
        if found is None:
            raise Unknown(value.name or "")
        return found

    def nodes_of(self, value: ir.Value) -> set[ir.Node]:
        """All nodes behind a value that was evaluated, up to looked-up tensors and shapes."""
        found: set[ir.Node] = set()
        stack = [value]
        while stack:
            producer = stack.pop().producer()
            if producer is None or producer in found:
                continue
            found.add(producer)
            if not is_op(producer, "Shape", "Size"):
                stack.extend(v for v in producer.inputs if v is not None)
        return found

    def looks(self, element: Element) -> set[ir.Value]:
        """Tensors that an element looks into."""
        found: set[ir.Value] = set()

        def lin(expression: Lin) -> None:
            for item, _ in expression.terms:
                if isinstance(item, Look):
                    found.add(item.value)
                    for place in item.index:
                        lin(place)

        def walk(item: Element) -> None:
            if isinstance(item, Lin):
                lin(item)
            elif isinstance(item, Cond):
                lin(item.lin)
                for each in item.parts:
                    walk(each)
            elif isinstance(item, Choice):
                walk(item.cond)
                walk(item.yes)
                walk(item.no)
            elif isinstance(item, Vec):
                for part in item.items:
                    walk(part)

        walk(element)
        return found

    # --- evaluation -------------------------------------------------------------------------------------------------

    def _evaluate(self, value: ir.Value) -> Tensor:
        if self.view.is_const(value):
            return self._constant(value)
        producer = value.producer()
        if producer is None:
            return self._leaf(value)
        rule = getattr(self, f"_on_{producer.op_type.lower()}", None)
        if rule is None or producer.domain not in ("", "ai.onnx"):
            raise Unknown(producer.op_type)
        found = rule(producer)
        assert isinstance(found, Tensor)
        return found

    def _leaf(self, value: ir.Value) -> Tensor:
        """A graph input: integers and truths are looked up."""
        if value.dtype not in (ir.DataType.INT64, ir.DataType.INT32, ir.DataType.BOOL) or value.shape is None:
            raise Unknown("a graph input")
        rank = len(value.shape)
        shape = tuple(of_dim(d, value, i) for i, d in enumerate(value.shape))
        found: Element = Lin(0, ((Look(value, tuple(axis(rank - i) for i in range(rank))), 1),))
        return Tensor(shape, truth(found) if value.dtype == ir.DataType.BOOL else found)

    def _constant(self, value: ir.Value) -> Tensor:
        array = self.view.array(value)
        if array is None:
            raise Unknown("a large constant")
        shape = tuple(Lin(d) for d in array.shape)
        if array.size and bool(np.all(array == array.flat[0])):
            return Tensor(shape, literal(array.flat[0]))
        if array.size <= 64 and array.ndim == 1:
            return Tensor(shape, Vec(tuple(literal(x) for x in array)))
        steps = [i for i in range(array.ndim) if array.shape[i] > 1]
        if len(steps) == 1 and array.dtype.kind in "iu":
            line = array.reshape(-1)
            slope = int(line[1]) - int(line[0])
            if np.array_equal(line, line[0] + slope * np.arange(len(line))):
                return Tensor(shape, Lin(int(line[0])) + axis(array.ndim - steps[0]).times(slope))
        if steps == [array.ndim - 2, array.ndim - 1]:
            return Tensor(shape, _triangle(array.reshape(array.shape[-2:])))
        raise Unknown("a constant without a rule")

    def _on_shape(self, node: ir.Node) -> Tensor:
        source = node.inputs[0]
        if source is None or source.shape is None:
            raise Unknown("a rank")
        known = [of_dim(d, source, i) for i, d in enumerate(source.shape)]
        if any(not isinstance(d, int) and d.value is None for d in source.shape):
            try:
                found = list(self(source).shape)
            except Unknown:
                found = known
            if found != known and self._cuts_table(source):
                raise Unknown("how much of a table there is")
            known = found
        rank = len(known)
        start, end = attribute_int(node, "start", 0), attribute_int(node, "end", rank)
        items = known[slice(start, end)]
        return Tensor((Lin(len(items)),), Vec(tuple(items)))

    def _cuts_table(self, value: ir.Value) -> bool:
        """Is a part of a constant table behind it? A cut may lie past the table's end."""
        cuts = (n.inputs[0] for n in self.nodes_of(value) if is_op(n, "Slice"))
        return any(v is not None and self.view.is_const(v) for v in cuts)

    def _vector(self, value: ir.Value | None) -> list[Lin]:
        """A one-dimensional tensor of integers, element by element."""
        tensor = self(value)
        if len(tensor.shape) > 1:
            raise Unknown("more than one axis")
        if isinstance(tensor.element, Vec):
            items: list[Element] = list(tensor.element.items)
        else:
            count = tensor.shape[0].number if tensor.shape else 1
            if count is None or count > 16:
                raise Unknown("a long vector")
            items = [put(tensor.element, {"@1": Lin(i)}) for i in range(count)]
        if not all(isinstance(i, Lin) for i in items):
            raise Unknown("not integers")
        return [i for i in items if isinstance(i, Lin)]

    def _scalar(self, value: ir.Value | None) -> Lin:
        items = self._vector(value)
        if len(items) != 1:
            raise Unknown("not a scalar")
        return items[0]

    def _on_range(self, node: ir.Node) -> Tensor:
        start, limit, delta = (self._scalar(v) for v in node.inputs)
        if delta.number != 1:
            raise Unknown("a step")
        return Tensor((limit - start,), start + axis(1))

    def _on_constantofshape(self, node: ir.Node) -> Tensor:
        shape = self._vector(node.inputs[0])
        attribute = node.attributes.get("value")
        filled = 0.0 if attribute is None else attribute.as_tensor().numpy().reshape(-1)[0]
        return Tensor(tuple(shape), literal(filled))


def _triangle(table: np.ndarray) -> Element:
    """A table of one number up to a diagonal and another behind it."""
    rows, columns = table.shape
    low = table[rows - 1, 0]
    first = np.flatnonzero(table[0] != low)
    offset = int(first[0]) - 1 if len(first) else columns - 1  # column - row <= offset: below
    if not len(first):
        raise Unknown("a table whose first row is of one number")
    below = np.arange(columns)[None, :] - np.arange(rows)[:, None] <= offset
    if not np.array_equal(table, np.where(below, low, table[0, first[0]])):
        raise Unknown("a table without a rule")
    kept = simplify(Cond("le", axis(1) - axis(2) - Lin(offset)))
    return choose(kept, literal(low), literal(table[0, first[0]]))
