"""The op's weight matrices from the graph's: stacked, turned, de-interleaved and joined when they are read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from ...custom_ops.moe.packing import pack
from .linear import Linear
from .stored import STACKED, Part, Quantized, Seen

Arrays = Mapping[ir.Value, np.ndarray]

#: Formats of stored numbers.
FORMATS = {
    ir.DataType.INT4: "int4",
    ir.DataType.UINT4: "uint4",
    ir.DataType.INT8: "int8",
    ir.DataType.UINT8: "uint8",
    ir.DataType.FLOAT8E4M3FN: "float8",
}


@dataclass(frozen=True)
class Slab:
    """Rows of one expert's matrix, or of all experts': ``seen`` with its axes (experts, output, input) and the output
    channels that are taken, in order."""

    seen: Seen
    expert: int | None
    out: int
    into: int
    rows: tuple[int, ...]

    @staticmethod
    def of(linear: Linear, rows: tuple[int, ...] | None = None) -> Slab:
        return Slab(
            linear.seen,
            linear.expert,
            linear.out,
            linear.into,
            rows if rows is not None else tuple(range(linear.width)),
        )

    @staticmethod
    def of_bias(linear: Linear, rows: tuple[int, ...]) -> Slab:
        """The layer's bias as a matrix of one column."""
        assert linear.bias is not None
        seen = linear.bias.seen
        return Slab(replace(seen, axes=(*seen.axes, None)), linear.bias.expert, linear.bias.out, len(seen.axes), rows)

    @property
    def order(self) -> tuple[int, ...]:
        return (self.out, self.into) if self.expert is None else (self.expert, self.out, self.into)

    def values(self) -> list[ir.Value]:
        """Every constant that the slab reads."""
        found = list(self.seen.values())
        for part in self.seen.parts:
            if part.quantized is not None:
                found.append(part.quantized.scale)
                if part.quantized.zero is not None:
                    found.append(part.quantized.zero)
        return found

    def numbers(self, arrays: Arrays) -> np.ndarray:
        """The stored numbers, ``[experts, rows, cols]`` or ``[rows, cols]``."""
        return self._assemble([_picked(p, arrays[p.source], self.seen.axes) for p in self.seen.parts], self.rows)

    def scales(self, arrays: Arrays, what: str) -> np.ndarray | None:
        """Scales or zero points, one for each row and block; None where blocks are cut up."""
        found = []
        for part in self.seen.parts:
            assert part.quantized is not None
            value = part.quantized.scale if what == "scale" else part.quantized.zero
            assert value is not None
            wide = _spread(part, part.quantized, arrays[value], arrays[part.source].shape, self._input_axis(part))
            if wide is None:
                return None
            found.append(_drop(wide, self.seen.axes))
        return self._assemble(found, self.rows)

    def _input_axis(self, part: Part) -> int:
        axis = self.seen.axes[self.into]
        assert axis is not None
        return axis

    def _assemble(self, parts: list[np.ndarray], rows: tuple[int, ...]) -> np.ndarray:
        """Stored tensors (their dropped axes gone) as ``[experts, rows, cols]``."""
        whole = [_insert(p, self.seen.axes) for p in parts]
        if STACKED in self.seen.axes:
            array = np.concatenate(whole, axis=self.seen.axes.index(STACKED))
        else:
            array = whole[0]
        spare = [i for i in range(array.ndim) if i not in self.order]
        array = np.transpose(array, (*spare, *self.order)).reshape([array.shape[i] for i in self.order])
        if rows == tuple(range(array.shape[-2])):
            return array
        return np.take(array, rows, axis=-2)


def _picked(part: Part, array: np.ndarray, axes: tuple[int | None, ...]) -> np.ndarray:
    for axis, indices in part.picks:
        array = _take(array, indices, axis)
    return _drop(array, axes)


def _take(array: np.ndarray, indices: Sequence[int], axis: int) -> np.ndarray:
    """Indices along an axis, as a view where they follow each other."""
    first, count = indices[0], len(indices)
    if list(indices) == list(range(first, first + count)):
        return array[(slice(None),) * axis + (slice(first, first + count),)]
    return np.take(array, indices, axis=axis)


def _drop(array: np.ndarray, axes: tuple[int | None, ...]) -> np.ndarray:
    """Axes of the stored tensor that are not seen, all of size one, dropped; the seen ones in the order seen."""
    seen = [a for a in axes if a is not None and a != STACKED]
    spare = [i for i in range(array.ndim) if i not in seen]
    return np.transpose(array, (*spare, *seen)).reshape([array.shape[a] for a in seen])


def _insert(array: np.ndarray, axes: tuple[int | None, ...]) -> np.ndarray:
    where = tuple(i for i, a in enumerate(axes) if a is None or a == STACKED)
    return np.expand_dims(array, where) if where else array


def _spread(
    part: Part, quantized: Quantized, array: np.ndarray, shape: tuple[int, ...], into: int
) -> np.ndarray | None:
    """Scales with as many axes as the stored tensor: one for each row, and for each block of the input channels."""
    rank = len(shape)
    if array.ndim <= 1 and array.size == 1:
        array = array.reshape([1] * rank)
    elif array.ndim == 1 and rank > 1 and not quantized.block:
        array = array.reshape([-1 if i == quantized.axis else 1 for i in range(rank)])
    if array.ndim != rank:
        return None
    if quantized.block and quantized.axis != into:
        array = np.take(
            np.repeat(array, quantized.block, axis=quantized.axis), range(shape[quantized.axis]), quantized.axis
        )
    block = quantized.block if quantized.axis == into else 0
    target = [array.shape[i] if i == into else shape[i] for i in range(rank)]
    array = np.broadcast_to(array, target)
    for axis, indices in part.picks:
        if axis != into or array.shape[axis] == shape[axis]:
            array = _take(array, indices, axis)
        elif array.shape[axis] > 1:
            blocks = np.array(indices).reshape(-1, block) // block if block and len(indices) % block == 0 else None
            if blocks is None or np.any(blocks != blocks[:, :1]):
                return None
            array = _take(array, [int(b) for b in blocks[:, 0]], axis)
    return array


def block_of(slab: Slab) -> int:
    """Input channels that share a scale; 0 for the whole row."""
    part = slab.seen.parts[0]
    assert part.quantized is not None
    scale = part.quantized.scale
    dims = [int(d) for d in scale.shape] if scale.shape is not None and scale.shape.is_static() else []  # type: ignore[arg-type]
    axis = slab.seen.axes[slab.into]
    if part.quantized.block:
        return part.quantized.block if part.quantized.axis == axis else 0
    return 1 if len(dims) == 1 and dims[0] > 1 and part.quantized.axis == axis else 0


def joined(
    slabs: Sequence[Sequence[Slab]], arrays: Arrays, read: Callable[[Slab, Arrays], np.ndarray | None]
) -> np.ndarray | None:
    """Matrices of all experts: for each expert its slabs one below the other; a single entry holds them all."""
    found: list[np.ndarray] = []
    for pieces in slabs:
        parts = [read(s, arrays) for s in pieces]
        known = [p for p in parts if p is not None]
        if len(known) != len(parts):
            return None
        found.append(known[0] if len(known) == 1 else np.concatenate(known, axis=-2))
    return found[0] if len(found) == 1 else np.stack(found)


def as_held(array: np.ndarray, kind: str) -> np.ndarray:
    """Stored numbers as the op holds them."""
    return np.ascontiguousarray(pack(array, kind))
