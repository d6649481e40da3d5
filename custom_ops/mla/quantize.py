"""8-bit caches of latents in NumPy: int8 with one scale a channel, float8 (e4m3fn) with one a token and 128 channels.

The codes are the nearest ones, ties to the even code, as every implementation of the op writes them.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from .spec import FLOAT8_GROUP

Array = NDArray[Any]
Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]

FLOAT8: Any = ml_dtypes.float8_e4m3fn
INT8_MAX = 127
#: The largest finite float8 e4m3fn.
FLOAT8_MAX = 448.0


def int8_scales(largest: Array) -> Float32:
    """Scales of an int8 cache from calibration.

    Args:
        largest: ``[R]``, the largest magnitude seen of each channel of the latent, after its norm.

    Returns:
        float32 ``[R]``: the largest magnitude becomes code 127. 1 where a channel was always zero.

    Raises:
        ValueError: a magnitude is negative or not finite.
    """
    size = np.asarray(largest, np.float64)
    if not np.all(np.isfinite(size)) or np.any(size < 0):
        raise ValueError("the magnitudes must be finite and not negative")
    return np.asarray(np.where(size > 0, size / INT8_MAX, 1.0), np.float32)


def quantize_int8(x: Array, scales: Array) -> NDArray[np.int8]:
    """Codes of ``x`` ``[..., R]`` with scales ``[R]``; values beyond the range take the last code."""
    codes = np.rint(np.asarray(x).astype(np.float64) / np.asarray(scales, np.float64))
    return np.clip(codes, -INT8_MAX, INT8_MAX).astype(np.int8)


def dequantize_int8(codes: Array, scales: Array) -> Float64:
    """``code * scale``, ``[..., R]``."""
    return np.asarray(codes, np.float64) * np.asarray(scales, np.float64)


def float8_groups(width: int) -> int:
    """Scales of one token: ceil(R / 128)."""
    return -(-width // FLOAT8_GROUP)


def _spread(scales: Array, width: int) -> Float64:
    """``[..., groups]`` scales to ``[..., R]``."""
    return np.repeat(np.asarray(scales).astype(np.float64), FLOAT8_GROUP, axis=-1)[..., :width]


def quantize_float8(x: Array) -> tuple[Array, Float32]:
    """Codes ``[..., R]`` (float8 e4m3fn) and scales ``[..., ceil(R/128)]`` (float32) of ``x`` ``[..., R]``."""
    value = np.asarray(x).astype(np.float64)
    width = value.shape[-1]
    groups = float8_groups(width)
    padded = np.zeros((*value.shape[:-1], groups * FLOAT8_GROUP))
    padded[..., :width] = np.abs(value)
    largest = padded.reshape(*value.shape[:-1], groups, FLOAT8_GROUP).max(axis=-1)
    scales = largest.astype(np.float32) / np.float32(FLOAT8_MAX)
    scales = np.where(scales > 0, scales, np.float32(1))
    return round_float8(value / _spread(scales, width)), scales


def round_float8(x: Array) -> Array:
    """The nearest float8 e4m3fn, ties to even; beyond 448 the largest one."""
    value = np.asarray(x, np.float64)
    _, exponent = np.frexp(value)  # value = m 2^exponent, 0.5 <= |m| < 1
    step = np.ldexp(1.0, np.maximum(exponent - 1, -6) - 3)
    return np.clip(np.rint(value / step) * step, -FLOAT8_MAX, FLOAT8_MAX).astype(np.float32).astype(FLOAT8)


def dequantize_float8(codes: Array, scales: Array) -> Float64:
    """``code * scale``, ``[..., R]``."""
    return np.asarray(codes).astype(np.float64) * _spread(scales, np.shape(codes)[-1])
