"""How weights lie in the model: uint8 bytes of 4-bit and float8 numbers, the same bytes as ONNX's own tensors have.

No op of the ONNX standard takes one expert out of an int4 or float8 tensor (``Gather`` and ``Slice`` do not know
these types), and a body that dequantized all experts would need gigabytes a layer. So the bytes are held as uint8: an
int4 tensor ``[.., rows, cols]`` with even cols is the uint8 tensor ``[.., rows, cols / 2]`` with the same raw data, the
first of two numbers in the low half; a float8e4m3fn tensor is the uint8 tensor of its own shape.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

FOUR_BIT = ("int4", "uint4")
#: NumPy types of the numbers that a quantized format stores.
STORED: dict[str, Any] = {
    "int4": ml_dtypes.int4,
    "uint4": ml_dtypes.uint4,
    "int8": np.int8,
    "uint8": np.uint8,
    "float8": ml_dtypes.float8_e4m3fn,
}
#: Least and largest stored number.
RANGES: dict[str, tuple[int, int]] = {
    "int4": (-8, 7),
    "uint4": (0, 15),
    "int8": (-128, 127),
    "uint8": (0, 255),
    "float8": (-448, 448),
}
#: NumPy types of zero points: one number an element, not packed.
ZERO_POINTS: dict[str, Any] = {"int4": np.int8, "int8": np.int8, "uint4": np.uint8, "uint8": np.uint8}


def packed_shape(shape: tuple[int, ...], kind: str) -> tuple[int, ...]:
    """Shape in the model of weights ``[.., cols]``."""
    return (*shape[:-1], shape[-1] // 2) if kind in FOUR_BIT else shape


def pack(numbers: Array, kind: str) -> Array:
    """Numbers in the range of ``kind`` (any NumPy type) as they lie in the model.

    Raises:
        ValueError: a 4-bit format and an odd last dimension.
    """
    if kind in FOUR_BIT:
        if numbers.shape[-1] % 2:
            raise ValueError(f"{kind} weights {list(numbers.shape)}: the last dimension must be even")
        nibbles = numbers.astype(np.int8).view(np.uint8) & 0x0F
        return nibbles[..., 0::2] | (nibbles[..., 1::2] << 4)
    stored = numbers.astype(STORED[kind])
    return stored.view(np.uint8) if kind == "float8" else stored


def unpack(stored: Array, kind: str) -> Array:
    """The inverse of :func:`pack`: int8, uint8 or float8_e4m3fn numbers ``[.., cols]``."""
    if kind in FOUR_BIT:
        both = np.stack([stored & 0x0F, stored >> 4], axis=-1).reshape(*stored.shape[:-1], 2 * stored.shape[-1])
        return ((both ^ 8).astype(np.int8) - np.int8(8)) if kind == "int4" else both
    return stored.view(STORED[kind])


def decode_table(kind: str) -> NDArray[np.float32]:
    """What each byte stands for: ``[256, 2]`` for 4-bit formats, ``[256]`` for the others."""
    values = unpack(np.arange(256, dtype=np.uint8)[:, None], kind).astype(np.float32)
    return values if kind in FOUR_BIT else values[:, 0]
