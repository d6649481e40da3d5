"""What the elements of a tensor in closed form are: expressions, truths, numbers, choices; and arithmetic on them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import onnx_ir as ir

from ..graph import FLOAT_TYPES
from .linear import FALSE, TRUE, Cond, Lin, axis, both, either, negate, simplify

LARGE = 1 << 31
#: Types that hold every place and size exactly: float32 does up to 2^24.
_WIDE = frozenset({ir.DataType.INT64, ir.DataType.INT32, ir.DataType.FLOAT, ir.DataType.DOUBLE})
#: Whole numbers up to this are exact in float16; what is larger is no count or flag.
_EXACT = 2048


@dataclass(frozen=True)
class Choice:
    """One of two numbers."""

    cond: Cond
    yes: Element
    no: Element


@dataclass(frozen=True)
class Vec:
    """A short last axis, element by element."""

    items: tuple[Element, ...]


#: An element: an integer expression, a truth, a number, a choice, or a short axis of these.
Element = Lin | Cond | float | Choice | Vec


@dataclass(frozen=True)
class Tensor:
    """Shape, and what the element at "@n", ..., "@1" is."""

    shape: tuple[Lin, ...]
    element: Element


class Unknown(Exception):
    """No closed form."""


def put(element: Element, change: dict[str, Lin]) -> Element:
    if isinstance(element, (Lin, Cond)):
        return element.put(change)
    if isinstance(element, Choice):
        return choose(element.cond.put(change), put(element.yes, change), put(element.no, change))
    if isinstance(element, Vec):
        return Vec(tuple(put(i, change) for i in element.items))
    return element


def choose(cond: Cond, yes: Element, no: Element) -> Element:
    if cond.kind in ("true", "false"):
        return yes if cond.kind == "true" else no
    if isinstance(yes, Cond) and isinstance(no, Cond):
        return either(both(cond, yes), both(negate(cond), no))
    return yes if yes == no else Choice(cond, yes, no)


def number_of(element: Element) -> float | None:
    if isinstance(element, Lin):
        return element.number
    return element if isinstance(element, (int, float)) else None


def map_leaves(element: Element, change: Callable[[Element], Element]) -> Element:
    if isinstance(element, Choice):
        return choose(element.cond, map_leaves(element.yes, change), map_leaves(element.no, change))
    return change(element)


def truth(element: Element) -> Cond:
    """Is it not zero?"""
    if isinstance(element, Cond):
        return element
    if isinstance(element, Lin):
        return negate(simplify(Cond("eq", element)))
    if isinstance(element, Choice):
        yes, no = truth(element.yes), truth(element.no)
        return either(both(element.cond, yes), both(negate(element.cond), no))
    if isinstance(element, (int, float)):
        return TRUE if element else FALSE
    raise Unknown("a vector as a truth")


def fitting(element: Element, to: ir.DataType) -> Element:
    """A number or an expression after a cast, which must not change it: places of any size fit wide types only.

    Raises:
        Unknown: it would be rounded or wrapped, for some place at least.
    """
    number = number_of(element)
    if number is None:
        if to not in _WIDE or not isinstance(element, Lin):
            raise Unknown("a cast that may round or wrap")
        return element
    if to in FLOAT_TYPES:
        if abs(number) > _EXACT and np.isfinite(number):
            return element  # a number that stands for minus infinity: its size may change, its meaning not
        exact = float(np.asarray(number, np.float64).astype(to.numpy())) == number or not np.isfinite(number)
    else:
        info = np.iinfo(to.numpy())
        exact = number == int(number) and info.min <= number <= info.max if np.isfinite(number) else False
    if not exact:
        raise Unknown("a cast that changes a number")
    return element


def literal(x: object) -> Element:
    number = np.asarray(x)
    if number.dtype.kind == "b":
        return TRUE if bool(number) else FALSE
    if number.dtype.kind in "iu":
        return Lin(int(number))
    as_float = float(number.astype(np.float64))
    return (
        Lin(int(as_float))
        if as_float == int(as_float if np.isfinite(as_float) else 0) and abs(as_float) < LARGE
        else as_float
    )


def even(vector: Vec) -> Element:
    """A vector as an expression of the place in it, where it rises evenly."""
    items = vector.items
    if len(items) == 1 or all(i == items[0] for i in items):
        return items[0]
    lines = [i for i in items if isinstance(i, Lin)]
    if len(lines) == len(items):
        steps = {(b - a).number for a, b in pairwise(lines)}
        if len(steps) == 1 and (slope := next(iter(steps))) is not None:
            return lines[0] + axis(1).times(slope)
    return vector


def flat(tensor: Tensor) -> Element:
    if not isinstance(tensor.element, Vec):
        return tensor.element
    found = even(tensor.element)
    if isinstance(found, Vec):
        raise Unknown("an uneven vector")
    return found


def settled(tensor: Tensor) -> Tensor:
    """Places along axes of size one are zero."""
    rank = len(tensor.shape)
    ones = {f"@{rank - i}": Lin(0) for i, d in enumerate(tensor.shape) if d.number == 1}
    element = tensor.element
    if isinstance(element, Vec) and len(element.items) == 1:
        element = element.items[0]
    return Tensor(tensor.shape, put(element, ones) if ones else element)


def broadcast(a: tuple[Lin, ...], b: tuple[Lin, ...]) -> tuple[Lin, ...]:
    rank = max(len(a), len(b))
    one = (Lin(1),)
    a, b = one * (rank - len(a)) + a, one * (rank - len(b)) + b
    return tuple(y if x.number == 1 else x for x, y in zip(a, b, strict=True))


def bound(place: Lin, size: Lin) -> Lin:
    """A slice's bound as a place from the start."""
    number = place.number
    if number is not None and number >= LARGE:
        return size
    if number is not None and number <= -LARGE:
        return Lin(0)
    if number is not None and number < 0:
        return size + place
    if number == 0 or place == size or (size - place).at_least_zero():
        return place
    if number == 1 and size.terms and size.at_least_zero():
        return place  # a dynamic axis has one entry at least
    raise Unknown("a bound that may lie past the end")


def place(bound_: Lin, size: Lin) -> Lin:
    """A slice's bound in a table, where sizes are trusted not to lie past its end."""
    return bound_ if bound_.terms and bound_.at_least_zero() else bound(bound_, size)


def combine(a: Element, b: Element, change: Callable[[Element, Element], Element]) -> Element:
    if isinstance(a, Choice):
        return choose(a.cond, combine(a.yes, b, change), combine(a.no, b, change))
    if isinstance(b, Choice):
        return choose(b.cond, combine(a, b.yes, change), combine(a, b.no, change))
    return change(a, b)


def add(x: Element, y: Element) -> Element:
    if isinstance(x, Lin) and isinstance(y, Lin):
        return x + y
    left, right = number_of(x), number_of(y)
    if left is None or right is None:
        raise Unknown("a sum")
    return left + right


def times(x: Element, factor: float) -> Element:
    if isinstance(x, Lin) and factor == int(factor):
        return x.times(int(factor))
    number = number_of(x)
    if number is None:
        raise Unknown("a product")
    return number * factor if number else Lin(0)


def multiply(x: Element, y: Element) -> Element:
    for one, other in ((x, y), (y, x)):
        number = number_of(one)
        if number is not None:
            if number == 0 and not isinstance(other, float):
                return Lin(0)
            if np.isfinite(number):
                return times(other, number)
            inner = number_of(other)
            if inner is not None:
                return number * inner if inner else float("nan")
    raise Unknown("a product")


def larger(x: Element, y: Element) -> Element:
    for one, other in ((x, y), (y, x)):
        if isinstance(one, Lin) and isinstance(other, Lin) and (one - other).at_least_zero():
            return one
    raise Unknown("a maximum")
