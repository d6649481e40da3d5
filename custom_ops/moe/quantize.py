"""Experts' weights to a quantized format: expert by expert, packed as the op has them, through a file on disk."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from ..common.parts_tensor import SpillFile, part_of
from ..common.quantize_matrix import Quantized, Statistics, quantize_matrix
from ..common.scheme import Scheme
from .packing import STORED, ZERO_POINTS, pack
from .reference import hidden, route
from .spec import MoeConfig

Array = NDArray[Any]
#: Rows of calibration data that are looked at, spread over what is given.
MAX_ROWS = 4096


@dataclass
class QuantizedStack:
    """A stack ``[E, rows, cols]`` in a quantized format.

    Attributes:
        weight, scale, zero_point: tensors as the op's inputs take them; scale and zero_point may be None.
        error: relative L2 norm of the difference from the weights before.
        product_error: the same of what the weights make of their inputs; None where nothing is known of these.
    """

    weight: ir.TensorProtocol
    scale: ir.TensorProtocol | None
    zero_point: ir.TensorProtocol | None
    error: float
    product_error: float | None = None


def effective_blocks(scheme: Scheme, config: MoeConfig, shared: bool) -> tuple[int, int]:
    """(block_size, block_rows) for the config: blocks as wide as the widest row are whole rows."""
    if scheme.kind == "bfloat16":
        return 0, 1
    inter = config.shared_intermediate_size if shared else config.intermediate_size
    widest = max(config.hidden_size, inter)
    return (0 if scheme.block_size >= widest else scheme.block_size), scheme.block_rows


def _too_fine(scale: Array | None) -> bool:
    """Scales that float16 holds with fewer digits than usual."""
    if scale is None or scale.dtype != np.float16:
        return False
    return bool(np.any((scale > 0) & (scale < np.finfo(np.float16).smallest_normal)))


def quantize_stack(
    tensor: ir.TensorProtocol,
    scheme: Scheme,
    scale_dtype: ir.DataType,
    spill: SpillFile,
    statistics: Callable[[int], Statistics | None] | None = None,
    progress: Callable[[int], None] | None = None,
) -> QuantizedStack | None:
    """Quantize ``[E, rows, cols]`` (or a matrix ``[rows, cols]``), one expert in memory at a time.

    Args:
        tensor: float weights.
        scheme: how.
        scale_dtype: type of the scales.
        spill: where the packed weights go until they are saved.
        statistics: of expert i's inputs.
        progress: called with the number of experts done.

    Returns:
        The tensors, or None where ``scale_dtype`` is too narrow for the scales (float16 and tiny weights).

    Raises:
        ValueError: weights that are not finite, or rows of odd length in a 4-bit format.
    """
    dims = tensor.shape.numpy()
    one = len(dims) == 2
    count = 1 if one else dims[0]
    starts: list[int] = []
    scales: list[Array] = []
    zeros: list[Array] = []
    error = norm = product = product_norm = 0.0
    packed: Array | None = None
    for index in range(count):
        matrix = tensor.numpy() if one else part_of(tensor, index)
        found: Quantized = quantize_matrix(
            matrix, scheme, scale_dtype.numpy(), None if statistics is None else statistics(index)
        )
        if _too_fine(found.scale):
            return None
        packed = pack(found.stored, scheme.kind) if scheme.kind in STORED else found.stored
        starts.append(spill.append(packed))
        if found.scale is not None:
            scales.append(found.scale)
        if found.zero_point is not None:
            zeros.append(found.zero_point.astype(ZERO_POINTS[scheme.kind]))
        error, norm = error + found.error, norm + found.norm
        product, product_norm = product + found.product_error, product_norm + found.product_norm
        if progress is not None:
            progress(index + 1)
    assert packed is not None

    def joined(arrays: list[Array]) -> ir.TensorProtocol | None:
        return ir.tensor(arrays[0] if one else np.stack(arrays)) if arrays else None

    weight: ir.TensorProtocol = spill.tensor(starts, ir.DataType.from_numpy(packed.dtype), packed.shape)
    if one:
        start, shape, dtype = starts[0], packed.shape, packed.dtype
        weight = ir.LazyTensor(
            lambda: ir.tensor(spill.read(start, shape, dtype)), ir.DataType.from_numpy(dtype), ir.Shape(shape)
        )
    relative = float(np.sqrt(error / norm)) if norm else 0.0
    of_products = float(np.sqrt(max(0.0, product) / product_norm)) if product_norm > 0 else None
    return QuantizedStack(weight, joined(scales), joined(zeros), relative, of_products)


class ExpertStatistics:
    """What each expert's two matrices are multiplied with, from samples of the op's input x.

    gate_up sees the tokens of the whole block (an expert's own are too few to tell much); down sees what the expert's
    first half makes of the tokens that the router sends to it.
    """

    def __init__(
        self,
        config: MoeConfig,
        x: Array,
        router: Mapping[str, Array] | None,
        gate_up: Callable[[int], Array],
        bias: Array | None = None,
        algorithm: str = "gptq",
    ) -> None:
        """
        Args:
            config: the call, weights as they are before.
            x: samples ``[n, D]``.
            router: router_weight, router_bias, expert_bias as arrays. None: it is not known which expert sees which
                token, and each is taken to see them all.
            gate_up: float weights ``[G*I, D]`` of an expert.
            bias: of these, ``[F, G*I]``.
            algorithm: what the statistics are for (:class:`Statistics`).
        """
        rows = x.reshape(-1, config.hidden_size)
        rows = rows[np.all(np.isfinite(rows.astype(np.float32)), axis=1)]
        if len(rows) > MAX_ROWS:
            rows = rows[np.linspace(0, len(rows) - 1, MAX_ROWS).astype(np.int64)]
        self._config, self._rows, self._gate_up = config, rows.astype(np.float32), gate_up
        self._shared = Statistics.of(rows, algorithm)
        self._ids = None if router is None else route(config, rows, router).ids
        self._bias, self._algorithm = bias, algorithm

    def gate_up(self, index: int) -> Statistics | None:
        return self._shared

    def down(self, index: int) -> Statistics | None:
        seen = self._rows
        if self._ids is not None:
            seen = seen[np.any(self._ids == index, axis=1)]
        if not len(seen):
            return None
        mixed = seen @ np.asarray(self._gate_up(index), np.float32).T
        if self._bias is not None:
            mixed = mixed + self._bias[index].astype(np.float32)
        return Statistics.of(hidden(self._config, mixed.astype(np.float64)), self._algorithm)
