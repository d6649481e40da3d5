"""Values in closed form: sums, comparisons, truths and choices."""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from ..graph import attribute_int
from .elements import (
    Element,
    Tensor,
    Unknown,
    Vec,
    add,
    broadcast,
    choose,
    combine,
    flat,
    larger,
    map_leaves,
    multiply,
    number_of,
    times,
    truth,
)
from .linear import FALSE, TRUE, Cond, Lin, axis, both, either, negate, simplify
from .symbolic_base import Evaluator


class Values(Evaluator):
    """Nodes that compute, element by element or along a line."""

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
