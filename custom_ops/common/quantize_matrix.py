"""One weight matrix to a quantized format: round to nearest, blocks chosen by what they cost, or with error feedback.

With statistics of what the matrix is multiplied with, two things are added, both only where they lower the error of the
*product*: each block's scale is searched for (weighted by the mean square of its channels, as activation-aware
methods do), and each column's rounding error is made up for in the columns after it (GPTQ, arXiv:2210.17323).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from .scheme import Scheme

Array = NDArray[Any]
Float = NDArray[np.float32]

#: Least and largest stored number. Symmetric scales put the largest weight on the largest number.
LIMITS: dict[str, tuple[int, int]] = {"int4": (-8, 7), "uint4": (0, 15), "int8": (-128, 127), "uint8": (0, 255)}
_FLOAT8_MAX = 448.0
#: Shares of the largest weight that the search for a block's scale tries.
_SHARES = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7)
#: Error feedback: columns at once, and what is added to the diagonal, as a share of its mean.
_STEP = 128
_DAMP = 0.01


@dataclass
class Quantized:
    """A stored matrix ``[rows, cols]``.

    Attributes:
        stored: numbers of the format, not packed: int8, uint8, float8_e4m3fn or bfloat16.
        scale: ``[ceil(rows / block_rows), ceil(cols / block_size)]``, or None for bfloat16.
        zero_point: int16 of the scale's shape, or None.
        error, norm: squared L2 norms of the difference and of the matrix itself.
        product_error, product_norm: squared L2 norms of the same times what the statistics know of the inputs: their
            rows, or channels of these mean squares as if they had nothing to do with each other. 0 without statistics.
    """

    stored: Array
    scale: Array | None
    zero_point: Array | None
    error: float
    norm: float
    product_error: float = 0.0
    product_norm: float = 0.0


@dataclass(frozen=True)
class Statistics:
    """Of the rows x that the matrix is multiplied with.

    Attributes:
        mean_square: ``[cols]``, of each channel. Scales are searched for with these as weights.
        gram: float64 ``[cols, cols]``, sum of x xᵀ, or None. With it, rounding errors are fed back.
        algorithm: what they are used for: "nearest", to say what an error does to the product; "aware", for scales
            too; "gptq", for all of that.
    """

    mean_square: NDArray[Any]
    gram: NDArray[np.float64] | None = None
    algorithm: str = "gptq"

    @cached_property
    def feedback(self) -> Float | None:
        """How a column's error is spread over the columns after it: the upper Cholesky factor of the damped gram's
        inverse. None without a gram, or where it can't be inverted. Found once, for all matrices with these inputs."""
        if self.gram is None or self.algorithm != "gptq":
            return None
        gram = self.gram.copy()
        diagonal = np.diag(gram)
        dead = diagonal <= 0
        if np.all(dead):
            return None
        damp = _DAMP * float(np.mean(diagonal[~dead]))
        gram[dead, dead] = 1.0
        gram[np.diag_indices_from(gram)] += damp
        try:
            return np.linalg.cholesky(np.linalg.inv(gram)).T.astype(np.float32)
        except np.linalg.LinAlgError:
            return None

    @classmethod
    def of(cls, rows: Array, algorithm: str = "gptq") -> Statistics | None:
        """From samples ``[n, cols]``; None where there are none, or none that is finite."""
        wide = rows.astype(np.float32).reshape(-1, rows.shape[-1])
        wide = wide[np.all(np.isfinite(wide), axis=1)]
        if not len(wide) or not np.any(wide):
            return None
        gram = (wide.T @ wide).astype(np.float64)
        return cls(np.diag(gram) / len(wide), gram, algorithm)

    @classmethod
    def of_channels(cls, mean_square: Array, algorithm: str = "gptq") -> Statistics | None:
        """From the mean squares of the channels; None where they say nothing."""
        usable = np.all(np.isfinite(mean_square)) and np.any(mean_square > 0)
        return cls(np.maximum(mean_square.astype(np.float64), 0), None, algorithm) if usable else None


def spread(of_blocks: Array, shape: tuple[int, int], block_size: int, block_rows: int = 1) -> Array:
    """Numbers of blocks, one for each element of ``[rows, cols]``."""
    rows, cols = shape
    wide = np.repeat(of_blocks, block_size or cols, axis=1)[:, :cols]
    return wide if block_rows == 1 else np.repeat(wide, block_rows, axis=0)[:rows]


def _blocks(matrix: Float, size: int, fill: float) -> Float:
    """``[rows, n, size]``, a short last block filled up."""
    rows, cols = matrix.shape
    count = -(-cols // size)
    if count * size != cols:
        matrix = np.pad(matrix, ((0, 0), (0, count * size - cols)), constant_values=fill)
    return matrix.reshape(rows, count, size)


def _in_type(scale: Array, dtype: Any) -> Float:
    """Rounded to the scale's type. Zero where a block is zero; never zero, never infinite where it is not."""
    info = ml_dtypes.finfo(dtype)
    rounded = np.clip(scale, float(info.smallest_subnormal), float(info.max)).astype(dtype).astype(np.float32)
    return np.where(scale > 0, rounded, np.float32(0))


def _round(matrix: Float, scale: Float, zero: Float | None, low: int, high: int) -> Float:
    with np.errstate(divide="ignore", invalid="ignore"):
        number = np.rint(np.where(scale > 0, matrix / scale, np.float32(0)))
    return np.clip(number if zero is None else number + zero, low, high)


def _integer_scales(
    matrix: Float, scheme: Scheme, dtype: Any, statistics: Statistics | None
) -> tuple[Float, Float | None]:
    """Scales and zero points of all blocks."""
    low, high = LIMITS[scheme.kind]
    cols = matrix.shape[1]
    size = min(scheme.block_size or cols, cols)
    blocks = _blocks(matrix, size, 0.0)

    def candidate(share: float) -> tuple[Float, Float | None]:
        if not scheme.asymmetric:
            return _in_type(share * np.max(np.abs(blocks), axis=2) / np.float32(high), dtype), None
        least = np.minimum(np.min(blocks, axis=2), 0) * np.float32(share)
        most = np.maximum(np.max(blocks, axis=2), 0) * np.float32(share)
        scale = _in_type((most - least) / np.float32(high - low), dtype)
        with np.errstate(divide="ignore", invalid="ignore"):
            zero = np.where(scale > 0, np.rint(low - least / scale), np.float32(low))
        return scale, np.clip(zero, low, high).astype(np.float32)

    best = candidate(1.0)
    if statistics is None or statistics.algorithm == "nearest":
        return best
    weight = _blocks((statistics.mean_square / np.max(statistics.mean_square)).astype(np.float32)[None], size, 0.0)
    lowest: Float | None = None
    for share in _SHARES:
        scale, zero = candidate(share)
        deep_scale, deep_zero = scale[..., None], None if zero is None else zero[..., None]
        number = _round(blocks, deep_scale, deep_zero, low, high)
        value = (number if deep_zero is None else number - deep_zero) * deep_scale
        cost = np.sum(weight * (blocks - value) ** 2, axis=2)
        if lowest is None:
            lowest, best = cost, (scale, zero)
            continue
        better = cost < lowest
        lowest = np.where(better, cost, lowest)
        old_scale, old_zero = best
        best = (
            np.where(better, scale, old_scale),
            None if zero is None or old_zero is None else np.where(better, zero, old_zero),
        )
    return best


def _with_feedback(matrix: Float, scale: Float, zero: Float | None, kind: str, inverse: Float) -> Float:
    """Numbers of all columns, each column's error made up for in those after it (``Statistics.feedback``)."""
    low, high = LIMITS[kind]
    left, numbers = matrix.copy(), np.empty_like(matrix)
    cols = matrix.shape[1]
    for start in range(0, cols, _STEP):
        stop = min(start + _STEP, cols)
        errors = np.empty((matrix.shape[0], stop - start), np.float32)
        for column in range(start, stop):
            part_zero = None if zero is None else zero[:, column]
            number = _round(left[:, column], scale[:, column], part_zero, low, high)
            value = (number if part_zero is None else number - part_zero) * scale[:, column]
            numbers[:, column] = number
            error = (left[:, column] - value) / inverse[column, column]
            errors[:, column - start] = error
            left[:, column + 1 : stop] -= np.outer(error, inverse[column, column + 1 : stop])
        left[:, stop:] -= errors @ inverse[start:stop, stop:]
    return numbers


def _product(matrix: Float, statistics: Statistics | None) -> float:
    """Squared L2 norm of a matrix times its inputs, as far as they are known."""
    if statistics is None:
        return 0.0
    if statistics.gram is None:
        return float(np.sum(np.sum(matrix * matrix, axis=0, dtype=np.float64) * statistics.mean_square))
    return float(np.sum((matrix @ statistics.gram.astype(np.float32)) * matrix, dtype=np.float64))


def quantize_matrix(
    matrix: Array, scheme: Scheme, scale_dtype: Any = np.float32, statistics: Statistics | None = None
) -> Quantized:
    """Quantize ``[rows, cols]``.

    Args:
        matrix: any float type.
        scheme: how.
        scale_dtype: NumPy type of the scales; numbers are rounded for the scales as they are in that type.
        statistics: of the matrix's inputs. Formats that are not integers are rounded to nearest with them, too.

    Raises:
        ValueError: weights that are not finite.
    """
    wide: Float = np.ascontiguousarray(matrix, dtype=np.float32)
    norm = float(np.vdot(wide, wide))
    if not np.isfinite(norm) and not np.all(np.isfinite(wide)):
        raise ValueError("weights are not all finite")
    if scheme.kind == "bfloat16":
        stored = wide.astype(ml_dtypes.bfloat16)
        return _measured(wide, stored.astype(np.float32), norm, statistics, (stored, None, None))
    if scheme.kind == "float8":
        return _float8(wide, scheme, scale_dtype, norm, statistics)
    scale, zero = _integer_scales(wide, scheme, scale_dtype, statistics)
    size = min(scheme.block_size or wide.shape[1], wide.shape[1])
    low, high = LIMITS[scheme.kind]
    deep_scale = spread(scale, wide.shape, size)
    deep_zero = None if zero is None else spread(zero, wide.shape, size)
    numbers = _round(wide, deep_scale, deep_zero, low, high)

    def value(of: Float) -> Float:
        return (of if deep_zero is None else of - deep_zero) * deep_scale

    inverse = None if statistics is None else statistics.feedback
    if inverse is not None:
        fed = _with_feedback(wide, deep_scale, deep_zero, scheme.kind, inverse)
        if _product(wide - value(fed), statistics) < _product(wide - value(numbers), statistics):
            numbers = fed
    stored = numbers.astype(np.int8 if low < 0 else np.uint8)
    held = (stored, scale.astype(scale_dtype), None if zero is None else zero.astype(np.int16))
    return _measured(wide, value(numbers), norm, statistics, held)


def _measured(
    wide: Float,
    value: Float,
    norm: float,
    statistics: Statistics | None,
    held: tuple[Array, Array | None, Array | None],
) -> Quantized:
    difference = wide - value
    error = float(np.vdot(difference, difference))
    return Quantized(*held, error, norm, _product(difference, statistics), _product(wide, statistics))


def _float8(wide: Float, scheme: Scheme, scale_dtype: Any, norm: float, statistics: Statistics | None) -> Quantized:
    rows, cols = wide.shape
    size = min(scheme.block_size or cols, cols)
    most = np.max(np.abs(_blocks(wide, size, 0.0)), axis=2)
    if scheme.block_rows != 1:
        most = np.maximum.reduceat(most, np.arange(0, rows, scheme.block_rows), axis=0)
    scale = _in_type(most / np.float32(_FLOAT8_MAX), scale_dtype)
    deep = spread(scale, wide.shape, size, scheme.block_rows)
    with np.errstate(divide="ignore", invalid="ignore"):
        number = np.where(deep > 0, wide / deep, np.float32(0))
    stored = np.clip(number, -_FLOAT8_MAX, _FLOAT8_MAX).astype(ml_dtypes.float8_e4m3fn)
    held = (stored, scale.astype(scale_dtype), None)
    return _measured(wide, stored.astype(np.float32) * deep, norm, statistics, held)
