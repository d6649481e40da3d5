"""Values that are made from sizes, positions and given masks, evaluated in closed form.

Every element of such a tensor is an expression of its place: that says what a mask is at every length, which no number
of runs could. What is not understood has no closed form, and the mask stays an operand.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from ..graph import GraphView, attribute_int, attribute_ints, is_op
from .elements import (
    Choice,
    Element,
    Tensor,
    Unknown,
    Vec,
    add,
    bound,
    broadcast,
    choose,
    combine,
    even,
    fitting,
    flat,
    larger,
    literal,
    map_leaves,
    multiply,
    number_of,
    put,
    settled,
    times,
    truth,
)
from .linear import FALSE, TRUE, Cond, Lin, Look, axis, both, either, negate, of_dim, simplify


class Symbolic:
    """Evaluates values of one graph; ``nodes`` collects what was understood on the way."""

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
        raise Unknown("a constant without a rule")

    def _on_shape(self, node: ir.Node) -> Tensor:
        source = node.inputs[0]
        if source is None or source.shape is None:
            raise Unknown("a rank")
        known = [of_dim(d, source, i) for i, d in enumerate(source.shape)]
        if any(not isinstance(d, int) and d.value is None for d in source.shape):
            try:
                known = list(self(source).shape)
            except Unknown:
                pass
        rank = len(known)
        start, end = attribute_int(node, "start", 0), attribute_int(node, "end", rank)
        items = known[slice(start, end)]
        return Tensor((Lin(len(items)),), Vec(tuple(items)))

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

    # --- moves ------------------------------------------------------------------------------------------------------

    def _on_identity(self, node: ir.Node) -> Tensor:
        return self(node.inputs[0])

    def _on_cast(self, node: ir.Node) -> Tensor:
        source = self(node.inputs[0])
        to = ir.DataType(node.attributes["to"].as_int())
        if isinstance(source.element, Vec):
            return Tensor(source.shape, Vec(tuple(fitting(item, to) for item in source.element.items)))
        if to == ir.DataType.BOOL:
            return Tensor(source.shape, truth(source.element))
        if isinstance(source.element, Cond):
            return Tensor(source.shape, choose(source.element, Lin(1), Lin(0)))
        return Tensor(source.shape, map_leaves(source.element, lambda x: fitting(x, to)))

    def _on_unsqueeze(self, node: ir.Node) -> Tensor:
        source = self(node.inputs[0])
        rank = len(source.shape) + len(axes := self.view.ints(node.inputs[1]) or [])
        new = {a % rank for a in axes}
        rest = iter(range(len(source.shape)))
        return self._placed(source, [None if i in new else next(rest) for i in range(rank)])

    def _on_squeeze(self, node: ir.Node) -> Tensor:
        source = self(node.inputs[0])
        rank = len(source.shape)
        if len(node.inputs) > 1 and node.inputs[1] is not None:
            gone = {a % rank for a in self.view.ints(node.inputs[1]) or []}
        else:
            gone = {i for i, d in enumerate(source.shape) if d.number == 1}
        return self._placed(source, [i for i in range(rank) if i not in gone])

    def _on_transpose(self, node: ir.Node) -> Tensor:
        source = self(node.inputs[0])
        order = attribute_ints(node, "perm") or list(range(len(source.shape)))[::-1]
        return self._placed(source, list(order))

    def _on_reshape(self, node: ir.Node) -> Tensor:
        """Axes of size one come and go."""
        source = self(node.inputs[0])
        try:
            target: list[Lin] = self._vector(node.inputs[1])
        except Unknown:
            known = node.outputs[0].shape
            if known is None:
                raise
            target = [of_dim(d, node.outputs[0], i) for i, d in enumerate(known)]
        kept = [i for i, d in enumerate(source.shape) if d.number != 1]
        wanted = [i for i, d in enumerate(target) if d.number != 1]
        if len(kept) == len(wanted) - 1:  # -1 is what is left: one
            wanted = [i for i in wanted if target[i].number != -1]
            target = [Lin(1) if d.number == -1 else d for d in target]
        if len(kept) != len(wanted):
            # one axis of unknown size may be one
            raise Unknown("a reshape that mixes axes")
        places: list[int | None] = [None] * len(target)
        for old, new in zip(kept, wanted, strict=True):
            size = target[new]
            if size.number not in (-1, 0) and size != source.shape[old]:
                raise Unknown("a reshape that mixes axes")
            places[new] = old
        return self._placed(source, places)

    @staticmethod
    def _placed(source: Tensor, places: list[int | None]) -> Tensor:
        """A tensor whose axis i is the source's axis ``places[i]``, or new, of size one."""
        rank, before = len(places), len(source.shape)
        element = source.element
        if isinstance(element, Vec):
            if not places or places[-1] != before - 1:
                element = even(element)
            if isinstance(element, Vec) and (not places or places[-1] != before - 1):
                raise Unknown("a vector that moves")
        gone = {f"@{before - i}": Lin(0) for i in range(before) if i not in places}
        moved = {f"@{before - p}": axis(rank - i) for i, p in enumerate(places) if p is not None}
        shape = tuple(Lin(1) if p is None else source.shape[p] for p in places)
        return Tensor(shape, put(element, {**gone, **moved}))

    def _on_expand(self, node: ir.Node) -> Tensor:
        source = self(node.inputs[0])
        return Tensor(broadcast(source.shape, tuple(self._vector(node.inputs[1]))), source.element)

    def _on_slice(self, node: ir.Node) -> Tensor:
        source = self(node.inputs[0])
        starts, ends = self._vector(node.inputs[1]), self._vector(node.inputs[2])
        rank = len(source.shape)
        axes = self.view.ints(node.inputs[3]) if len(node.inputs) > 3 and node.inputs[3] is not None else None
        steps = self.view.ints(node.inputs[4]) if len(node.inputs) > 4 and node.inputs[4] is not None else None
        if any(s != 1 for s in steps or ()):
            raise Unknown("steps")
        shape, element = list(source.shape), source.element
        for i, (start, end) in enumerate(zip(starts, ends, strict=True)):
            at = (axes[i] if axes is not None else i) % rank
            first, last = bound(start, shape[at]), bound(end, shape[at])
            if isinstance(element, Vec) and at == rank - 1:
                if first.number is None or last.number is None:
                    raise Unknown("a slice of a vector")
                element = Vec(element.items[first.number : last.number])
            else:
                element = put(element, {f"@{rank - at}": axis(rank - at) + first})
            shape[at] = last - first
        return Tensor(tuple(shape), element)

    def _on_concat(self, node: ir.Node) -> Tensor:
        parts = [self(v) for v in node.inputs]
        rank = len(parts[0].shape)
        at = attribute_int(node, "axis", 0) % rank
        counts = [p.shape[at].number for p in parts]
        if at == rank - 1 and all(c is not None and c <= 16 for c in counts):
            items: list[Element] = []
            for part, count in zip(parts, counts, strict=True):
                assert count is not None
                if isinstance(part.element, Vec):
                    items += part.element.items
                else:
                    items += [put(part.element, {"@1": Lin(i)}) for i in range(count)]
            shape = parts[0].shape
            for part in parts[1:]:
                shape = (*broadcast(shape[:-1], part.shape[:-1]), shape[-1])
            return Tensor((*shape[:-1], Lin(len(items))), Vec(tuple(items)))
        name = f"@{rank - at}"
        length, element = Lin(0), None
        for part in parts:
            shifted = put(part.element, {name: axis(rank - at) - length})
            if element is None:
                first, element = part, part.element
            elif shifted != element:
                # a first part of one entry may lie on the same line as what follows
                if length.number != 1 or put(shifted, {name: Lin(0)}) != put(element, {name: Lin(0)}):
                    raise Unknown("parts that differ")
                element = shifted
            length += part.shape[at]
        assert element is not None
        return Tensor((*first.shape[:at], length, *first.shape[at + 1 :]), element)

    def _on_gather(self, node: ir.Node) -> Tensor:
        data, index = self(node.inputs[0]), self(node.inputs[1])
        at = attribute_int(node, "axis", 0) % len(data.shape)
        if isinstance(data.element, Vec):
            if (index.shape and index.shape != (Lin(1),)) or at != len(data.shape) - 1:
                raise Unknown("a gather in a vector")
            number = number_of(index.element if not isinstance(index.element, Vec) else index.element.items[0])
            if number is None:
                raise Unknown("a computed place")
            item = data.element.items[int(number)]
            return Tensor((*data.shape[:-1], *index.shape), item)
        if not isinstance(index.element, Lin) or any(not d.at_least_zero() for d in (index.element,)):
            raise Unknown("a place that may be negative")
        extra, rank = len(index.shape), len(data.shape)
        after = rank - 1 - at
        place = index.element.put({f"@{i}": axis(i + after) for i in range(1, extra + 1)})
        change = {f"@{rank - i}": axis(rank - 1 + extra - i) for i in range(at)}
        element = put(data.element, {**change, f"@{rank - at}": place})
        return Tensor((*data.shape[:at], *index.shape, *data.shape[at + 1 :]), element)

    def _on_gathernd(self, node: ir.Node) -> Tensor:
        data, index = self(node.inputs[0]), self(node.inputs[1])
        if attribute_int(node, "batch_dims", 0):
            raise Unknown("batch_dims")
        depth = index.shape[-1].number
        if depth is None or depth != len(data.shape):
            raise Unknown("part of an index")
        if isinstance(index.element, Vec):
            items = list(index.element.items)
        else:
            items = [put(index.element, {"@1": Lin(i)}) for i in range(depth)]
        lower = {f"@{i}": axis(i - 1) for i in range(2, len(index.shape) + 1)}
        change: dict[str, Lin] = {}
        for i, item in enumerate(items):
            if not isinstance(item, Lin) or not item.at_least_zero():
                raise Unknown("a place that may be negative")
            change[f"@{depth - i}"] = item.put(lower)
        return Tensor(index.shape[:-1], put(data.element, change))

    # --- arithmetic ---------------------------------------------------------------------------------------------------

    def _pair(self, node: ir.Node) -> tuple[Element, Element, tuple[Lin, ...]]:
        a, b = self(node.inputs[0]), self(node.inputs[1])
        return flat(a), flat(b), broadcast(a.shape, b.shape)

    def _vectors(self, node: ir.Node, change: Callable[[Element, Element], Element]) -> Tensor | None:
        """Elementwise over short vectors."""
        a, b = self(node.inputs[0]), self(node.inputs[1])
        if not isinstance(a.element, Vec) and not isinstance(b.element, Vec):
            return None
        if len(a.shape) > 1 or len(b.shape) > 1:
            return None
        left, right = self._vector(node.inputs[0]), self._vector(node.inputs[1])
        count = max(len(left), len(right))
        left, right = (side * count if len(side) == 1 else side for side in (left, right))
        return Tensor((Lin(count),), Vec(tuple(change(x, y) for x, y in zip(left, right, strict=True))))

    def _arithmetic(self, node: ir.Node, change: Callable[[Element, Element], Element]) -> Tensor:
        vectors = self._vectors(node, change)
        if vectors is not None:
            return vectors
        a, b, shape = self._pair(node)
        return Tensor(shape, combine(a, b, change))

    def _on_add(self, node: ir.Node) -> Tensor:
        return self._arithmetic(node, add)

    def _on_sub(self, node: ir.Node) -> Tensor:
        return self._arithmetic(node, lambda x, y: add(x, times(y, -1)))

    def _on_mul(self, node: ir.Node) -> Tensor:
        return self._arithmetic(node, multiply)

    def _on_neg(self, node: ir.Node) -> Tensor:
        source = self(node.inputs[0])
        return Tensor(source.shape, map_leaves(flat(source), lambda x: times(x, -1)))

    def _on_max(self, node: ir.Node) -> Tensor:
        return self._arithmetic(node, larger)

    def _compare(
        self, node: ir.Node, make: Callable[[Lin, Lin], Cond], plain: Callable[[float, float], bool]
    ) -> Tensor:
        a, b, shape = self._pair(node)

        def decide(x: Element, y: Element) -> Element:
            if isinstance(x, Lin) and isinstance(y, Lin):
                return simplify(make(x, y))
            left, right = number_of(x), number_of(y)
            if left is None or right is None:
                raise Unknown("a comparison")
            return TRUE if plain(left, right) else FALSE

        return Tensor(shape, combine(a, b, decide))

    def _on_less(self, node: ir.Node) -> Tensor:
        return self._compare(node, lambda x, y: Cond("le", x - y + Lin(1)), lambda x, y: x < y)

    def _on_lessorequal(self, node: ir.Node) -> Tensor:
        return self._compare(node, lambda x, y: Cond("le", x - y), lambda x, y: x <= y)

    def _on_greater(self, node: ir.Node) -> Tensor:
        return self._compare(node, lambda x, y: Cond("le", y - x + Lin(1)), lambda x, y: x > y)

    def _on_greaterorequal(self, node: ir.Node) -> Tensor:
        return self._compare(node, lambda x, y: Cond("le", y - x), lambda x, y: x >= y)

    def _on_equal(self, node: ir.Node) -> Tensor:
        a, b, shape = self._pair(node)
        if isinstance(a, Cond) and isinstance(b, Cond):
            same = either(both(a, b), both(negate(a), negate(b)))
            return Tensor(shape, same)
        return self._compare(node, lambda x, y: Cond("eq", x - y), lambda x, y: x == y)

    def _on_not(self, node: ir.Node) -> Tensor:
        source = self(node.inputs[0])
        return Tensor(source.shape, negate(truth(flat(source))))

    def _on_and(self, node: ir.Node) -> Tensor:
        a, b, shape = self._pair(node)
        return Tensor(shape, both(truth(a), truth(b)))

    def _on_or(self, node: ir.Node) -> Tensor:
        a, b, shape = self._pair(node)
        return Tensor(shape, either(truth(a), truth(b)))

    def _on_where(self, node: ir.Node) -> Tensor:
        cond, yes, no = (self(v) for v in node.inputs)
        shape = broadcast(broadcast(cond.shape, yes.shape), no.shape)
        return Tensor(shape, choose(truth(flat(cond)), flat(yes), flat(no)))

    def _on_trilu(self, node: ir.Node) -> Tensor:
        source = self(node.inputs[0])
        offset = self._scalar(node.inputs[1]) if len(node.inputs) > 1 and node.inputs[1] is not None else Lin(0)
        gap = axis(1) - axis(2) - offset  # column - row - k
        upper = attribute_int(node, "upper", 1)
        kept = simplify(Cond("le", gap.times(-1) if upper else gap))
        zero: Element = FALSE if isinstance(source.element, Cond) else Lin(0)
        return Tensor(source.shape, choose(kept, flat(source), zero))

    def _on_cumsum(self, node: ir.Node) -> Tensor:
        source = self(node.inputs[0])
        number = number_of(flat(source))
        if attribute_int(node, "reverse", 0) or number is None or number != int(number):
            raise Unknown("a running sum")
        rank = len(source.shape)
        at = axis(rank - (int(self._scalar(node.inputs[1]).const) % rank))
        there = at if attribute_int(node, "exclusive", 0) else at + Lin(1)
        return Tensor(source.shape, there.times(int(number)))
