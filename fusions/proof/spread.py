"""Where heads lie in a value, and where a reshape takes them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir


class HeadsMix(Exception):
    """The region can't be shown to compute its heads one by one."""


@dataclass(frozen=True)
class Spread:
    """Heads lie along ``axis``: index i of it belongs to head ``owner[i]``."""

    axis: int
    owner: tuple[int, ...]

    def kept(self, heads: frozenset[int]) -> list[int]:
        return [i for i, head in enumerate(self.owner) if head in heads]


def shape_of(value: ir.Value) -> list[int]:
    """The static shape of a value.

    Raises:
        HeadsMix: a dim without a number.
    """
    if value.shape is None or not value.shape.is_static():
        raise HeadsMix(f"the shape of {value.name!r} is not static")
    return [int(d) for d in value.shape]  # type: ignore[arg-type]


def through_reshape(before: list[int], after: list[int], spread: Spread) -> Spread:
    """Where the heads are after a reshape: the smallest block of axes that both shapes share around the heads' axis."""
    low = high = spread.axis
    while True:
        outer, size = int(np.prod(before[:low])), int(np.prod(before[low : high + 1]))
        found = _block(after, outer, size)
        if found is not None:
            break
        # the block's border is no border of the result: take in a neighbour, the inner one first
        if high + 1 < len(before) and _block_start(after, outer) is not None:
            high += 1
        elif low > 0:
            low -= 1
        elif high + 1 < len(before):
            high += 1
        else:
            raise HeadsMix("a reshape that mixes heads with other axes")
    first, last = found
    owner = np.broadcast_to(
        np.array(spread.owner).reshape([-1 if i == spread.axis else 1 for i in range(low, high + 1)]),
        before[low : high + 1],
    ).reshape(after[first : last + 1])
    varying = [i for i in range(owner.ndim) if owner.shape[i] > 1 and np.any(np.take(owner, [0], i) != owner)]
    if len(varying) != 1:
        raise HeadsMix("a reshape that spreads heads over several axes")
    line = np.moveaxis(owner, varying[0], -1).reshape(-1, owner.shape[varying[0]])[0]
    return Spread(first + varying[0], tuple(int(h) for h in line))


def _block_start(shape: list[int], outer: int) -> int | None:
    product = 1
    for i, size in enumerate([*shape, 1]):
        if product == outer:
            return i
        product *= size
    return None


def _block(shape: list[int], outer: int, size: int) -> tuple[int, int] | None:
    """The axes of ``shape`` that start after ``outer`` elements and hold ``size``."""
    start = _block_start(shape, outer)
    if start is None:
        return None
    product = 1
    for i in range(start, len(shape)):
        product *= shape[i]
        if product == size:
            # trailing axes of size one belong to it or not, it makes no difference
            return start, i
        if product > size:
            return None
    return None
