"""Linear expressions over sizes and axis positions, and conditions on them: what masks are made of."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass

import onnx_ir as ir


@dataclass(frozen=True)
class Look:
    """An element of an integer or boolean tensor that only a run knows."""

    value: ir.Value
    index: tuple[Lin, ...]


#: A size's symbol, an axis position ("@1" is the last axis, "@2" the one before), or an element looked up.
Atom = str | Look


@dataclass(frozen=True)
class Lin:
    """``const + sum of factor * atom``."""

    const: int = 0
    terms: tuple[tuple[Atom, int], ...] = ()

    @staticmethod
    def of(const: int, terms: Mapping[Atom, int]) -> Lin:
        kept = {a: f for a, f in terms.items() if f}
        return Lin(const, tuple(sorted(kept.items(), key=lambda t: (str(type(t[0])), repr(t[0])))))

    def __add__(self, other: Lin) -> Lin:
        terms = dict(self.terms)
        for atom, factor in other.terms:
            terms[atom] = terms.get(atom, 0) + factor
        return Lin.of(self.const + other.const, terms)

    def times(self, factor: int) -> Lin:
        return Lin.of(self.const * factor, {a: f * factor for a, f in self.terms})

    def __sub__(self, other: Lin) -> Lin:
        return self + other.times(-1)

    @property
    def number(self) -> int | None:
        return None if self.terms else self.const

    def at_least_zero(self) -> bool:
        """Sizes and positions are never negative."""
        return self.const >= 0 and all(f > 0 and isinstance(a, str) for a, f in self.terms)

    def put(self, change: Mapping[str, Lin]) -> Lin:
        """Replace axis positions."""
        found = Lin(self.const)
        for atom, factor in self.terms:
            if isinstance(atom, Look):
                moved = Look(atom.value, tuple(i.put(change) for i in atom.index))
                found += Lin(0, ((moved, factor),))
            else:
                found += change.get(atom, Lin(0, ((atom, 1),))).times(factor)
        return found


def atom(name: Atom) -> Lin:
    return Lin(0, ((name, 1),))


def axis(number: int) -> Lin:
    """The position along an axis, counted from the last, which is 1."""
    return atom(f"@{number}")


@dataclass(frozen=True)
class Cond:
    """A condition. kind: "le" expression <= 0, "eq" expression == 0, "and", "or", "not", "true", "false"."""

    kind: str
    lin: Lin = Lin()
    parts: tuple[Cond, ...] = ()

    def put(self, change: Mapping[str, Lin]) -> Cond:
        return simplify(Cond(self.kind, self.lin.put(change), tuple(p.put(change) for p in self.parts)))


TRUE, FALSE = Cond("true"), Cond("false")


def simplify(cond: Cond) -> Cond:
    """Decide what numbers decide."""
    if cond.kind in ("le", "eq"):
        number = cond.lin.number
        if number is not None:
            return TRUE if (number <= 0 if cond.kind == "le" else number == 0) else FALSE
        if cond.kind == "le" and cond.lin.times(-1).at_least_zero():
            return TRUE
        if cond.kind == "le" and (cond.lin + Lin(-1)).at_least_zero():
            return FALSE
        return cond
    if cond.kind == "not":
        inner = cond.parts[0]
        if inner.kind in ("true", "false"):
            return FALSE if inner.kind == "true" else TRUE
        if inner.kind == "not":
            return inner.parts[0]
        if inner.kind == "le":  # not (e <= 0) is e >= 1
            return simplify(Cond("le", Lin(1) - inner.lin))
        return cond
    if cond.kind in ("and", "or"):
        neutral, decisive = (TRUE, FALSE) if cond.kind == "and" else (FALSE, TRUE)
        parts: list[Cond] = []
        for part in cond.parts:
            inner_parts = part.parts if part.kind == cond.kind else (part,)
            parts += [p for p in inner_parts if p != neutral and p not in parts]
        if decisive in parts:
            return decisive
        if not parts:
            return neutral
        return parts[0] if len(parts) == 1 else Cond(cond.kind, parts=tuple(parts))
    return cond


def negate(cond: Cond) -> Cond:
    return simplify(Cond("not", parts=(cond,)))


def both(a: Cond, b: Cond) -> Cond:
    return simplify(Cond("and", parts=(a, b)))


def either(a: Cond, b: Cond) -> Cond:
    return simplify(Cond("or", parts=(a, b)))


def of_dim(dim: int | ir.SymbolicDim | None, value: ir.Value, place: int) -> Lin:
    """A dim as an expression; an unnamed one is a symbol of its own."""
    if isinstance(dim, int):
        return Lin(dim)
    text = None if dim is None else dim.value
    parsed = None if text is None else parse(str(text))
    return parsed if parsed is not None else atom(str(text) if text is not None else f"?{id(value)}.{place}")


def parse(text: str) -> Lin | None:
    """A dim's expression, such as ``past + 1`` or ``2*B``; None when it is not linear."""
    try:
        return _walk(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError):
        return None


def _walk(node: ast.expr) -> Lin | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return Lin(node.value)
    if isinstance(node, ast.Name):
        return atom(node.id)
    if isinstance(node, ast.BinOp):
        left, right = _walk(node.left), _walk(node.right)
        if left is None or right is None:
            return None
        if isinstance(node.op, ast.Add):
            return left + right
        if isinstance(node.op, ast.Sub):
            return left - right
        if isinstance(node.op, ast.Mult) and (left.number is not None or right.number is not None):
            return right.times(left.const) if left.number is not None else left.times(right.const)
    return None
