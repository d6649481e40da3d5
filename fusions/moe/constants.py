"""The constants of a proof: a designed router, and experts' weights drawn afresh. None of the graph's own is read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import ml_dtypes
import numpy as np
import onnx_ir as ir

from ..candidate import Candidate
from ..graph import FLOAT_TYPES, static_dims
from .block import MoeCandidate
from .design import design
from .slabs import Slab

_FOUR_BIT = {ir.DataType.INT4: (-8, 7), ir.DataType.UINT4: (0, 15)}
_KEEP = 64 << 20


class Drawn(Mapping[ir.Value, np.ndarray]):
    """An array for each source of the candidate's parameters, the same at every reading.

    Args:
        candidate: the whole block's, or that of a part.
        dims: shapes of the sources where they are not the graph's own.
    """

    def __init__(self, candidate: Candidate, seed: int, dims: Mapping[ir.Value, tuple[int, ...]] | None = None) -> None:
        assert isinstance(candidate, MoeCandidate)
        self._seed, self._dims = seed, dims or {}
        self._kept: dict[ir.Value, np.ndarray] = {}
        self._scale: dict[ir.Value, float] = {}
        self._stored: dict[ir.Value, float] = {}
        sources = [s for p in candidate.parameters.values() for s in p.sources]
        self._place = {value: i for i, value in enumerate(dict.fromkeys(sources))}
        for matrix in candidate.slabs.values():
            for slab in (s for pieces in matrix for s in pieces):
                self._sizes(slab)
        made = design(candidate.config)
        for name, source in candidate.vectors.items():
            array = made.bias if name == "router_bias" else made.choice_bias
            self._kept[source] = array.reshape(self.shape(source))
        if "router" in candidate.slabs:
            self._put(candidate.slabs["router"][0][0], made.weight)

    def _sizes(self, slab: Slab) -> None:
        axis = slab.seen.axes[slab.into]
        for part in slab.seen.parts:
            depth = 1 if axis is None else self.shape(part.source)[axis]
            self._scale.setdefault(part.source, depth**-0.5)
            if part.quantized is not None:
                span = {ir.DataType.INT4: 4.0, ir.DataType.UINT4: 4.0}.get(part.source.dtype, 64.0)  # type: ignore[arg-type]
                self._stored[part.quantized.scale] = depth**-0.5 / span

    def _put(self, slab: Slab, matrix: np.ndarray) -> None:
        """Let a slab's source hold what gives this matrix."""
        source = slab.seen.parts[0].source
        shape = self.shape(source)
        numbers = np.arange(int(np.prod(shape))).reshape(shape)
        places = slab.numbers({source: numbers})
        flat = np.zeros(numbers.size, np.float32)
        flat[places.reshape(-1)] = matrix.reshape(-1)
        self._kept[source] = flat.reshape(shape)

    def shape(self, value: ir.Value) -> tuple[int, ...]:
        if value in self._dims:
            return self._dims[value]
        return tuple(int(d or 0) for d in static_dims(value) or ())

    def __iter__(self) -> Iterator[ir.Value]:
        return iter(self._place)

    def __len__(self) -> int:
        return len(self._place)

    def __contains__(self, value: object) -> bool:
        return value in self._place

    def __getitem__(self, value: ir.Value) -> np.ndarray:
        if value in self._kept:
            return self._kept[value]
        rng = np.random.default_rng([self._seed, self._place[value]])
        array = self._draw(value, rng)
        if array.nbytes <= _KEEP:
            self._kept[value] = array
        return array

    def _draw(self, value: ir.Value, rng: np.random.Generator) -> np.ndarray:
        shape, dtype = self.shape(value), value.dtype
        if value in self._stored:
            return (self._stored[value] * rng.uniform(0.3, 1.7, shape)).astype(np.float32)
        if dtype in _FOUR_BIT:
            low, high = _FOUR_BIT[dtype]
            return rng.integers(low, high + 1, shape, np.int8).astype(dtype.numpy())
        if dtype in (ir.DataType.INT8, ir.DataType.UINT8):
            limits = np.iinfo(dtype.numpy())
            return rng.integers(limits.min, limits.max + 1, shape, np.int16).astype(dtype.numpy())
        if dtype is not None and dtype not in FLOAT_TYPES:
            return (rng.standard_normal(shape, np.float32) * 64.0).astype(ml_dtypes.float8_e4m3fn)
        return rng.standard_normal(shape, np.float32) * np.float32(self._scale.get(value, 0.3))
