"""Large weights of MatMul and Gemm: a ``DequantizeLinear`` in front of the product, which keeps its type.

Weights are stored ``[K, N]`` with blocks along K, the form that ONNX Runtime turns into its own MatMulNBits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from ...custom_ops.common.parts_tensor import SpillFile
from ...custom_ops.common.quantize_matrix import Quantized, Statistics, quantize_matrix
from ...custom_ops.common.scheme import Scheme
from ..graph import FLOAT_TYPES, attribute_int
from ..result import QuantizedTensor
from .experts import is_calibrated
from .initializers import Names, Sources, add_initializer
from .spec import QuantizeError

#: Weights of fewer elements stay as they are.
MIN_ELEMENTS = 1 << 16
_STORED = {
    "int4": ir.DataType.INT4,
    "uint4": ir.DataType.UINT4,
    "int8": ir.DataType.INT8,
    "uint8": ir.DataType.UINT8,
    "float8": ir.DataType.FLOAT8E4M3FN,
}
Log = Callable[[str], None]


@dataclass(frozen=True)
class _Use:
    """One product: operand ``place`` of ``node`` is the weight, as ``[K, N]`` or, turned, as ``[N, K]``."""

    node: ir.Node
    place: int
    turned: bool  # the value that the product reads
    activation: ir.Value | None


def needed_opset(scheme: Scheme) -> int:
    """The opset from which ONNX has what the scheme needs of ``DequantizeLinear``."""
    if scheme.kind == "bfloat16":
        return 13
    if scheme.kind in ("int4", "uint4") or scheme.block_size or scheme.block_rows > 1:
        return 21
    return 19 if scheme.kind == "float8" else 13


def _product(node: ir.Node, value: ir.Value) -> _Use | None:
    if node.domain or node.op_type not in ("MatMul", "Gemm") or len(node.inputs) < 2 or node.inputs[1] is not value:
        return None
    if node.inputs[0] is value or attribute_int(node, "transA", 0):
        return None
    turned = node.op_type == "Gemm" and attribute_int(node, "transB", 0) == 1
    return _Use(node, 1, turned, node.inputs[0])


def _uses(weight: ir.Value) -> list[tuple[_Use, bool]] | None:
    """The products that read a weight, and whether through a Transpose; None where anything else reads it."""
    found: list[tuple[_Use, bool]] = []
    for use in weight.uses():
        product = _product(use.node, weight)
        if product is not None:
            found.append((product, False))
            continue
        if use.node.domain or use.node.op_type != "Transpose" or use.node.outputs[0].is_graph_output():
            return None
        for later in use.node.outputs[0].uses():
            product = _product(later.node, use.node.outputs[0])
            if product is None:
                return None
            found.append((product, True))
    return found


def quantize_dense(
    model: ir.Model,
    scheme: Scheme,
    statistics: Mapping[str, Statistics],
    spill: SpillFile,
    names: Names,
    log: Log,
    progress: Callable[[int, int], None],
    sources: Sources | None = None,
) -> list[QuantizedTensor]:
    """Quantize the constant weights of the main graph's products.

    The arguments are those of :func:`.experts.quantize_experts`.
    """
    weights = [v for v in model.graph.initializers.values() if _is_weight(v)]
    done = []
    for number, weight in enumerate(weights):
        progress(number, len(weights))
        uses = _uses(weight)
        if not uses:
            if uses is None and any(_product(use.node, weight) for use in weight.uses()):
                log(f"{weight.name}: other nodes than products read it too")
            continue
        if len({use.turned == through for use, through in uses}) > 1:
            log(f"{weight.name}: products read it both ways")
            continue
        done.append(_quantize(model, weight, uses, scheme, statistics, spill, names, log))
        if sources is not None:
            sources.unmap()
    if weights:
        progress(len(weights), len(weights))
    return done


def _is_weight(value: ir.Value) -> bool:
    tensor = value.const_value
    return (
        tensor is not None
        and tensor.dtype in FLOAT_TYPES
        and len(tensor.shape) == 2
        and tensor.size >= MIN_ELEMENTS
        and not value.is_graph_input()
        and not value.is_graph_output()
    )


def _quantize(
    model: ir.Model,
    weight: ir.Value,
    uses: list[tuple[_Use, bool]],
    scheme: Scheme,
    statistics: Mapping[str, Statistics],
    spill: SpillFile,
    names: Names,
    log: Log,
) -> QuantizedTensor:
    tensor = weight.const_value
    assert tensor is not None
    # [K, N] as stored: read as it is by a product that is not turned, or through one turn by one that is
    stored_kn = uses[0][0].turned == uses[0][1]
    stored = tensor.numpy()
    rows = np.ascontiguousarray(stored.T if stored_kn else stored)  # [N, K]
    seen = None
    for use, _ in uses:
        if use.activation is not None:
            found = statistics.get(use.activation.name or "")
            if found is not None and len(found.mean_square) == rows.shape[1]:  # else of another model
                seen = seen or found
    if statistics and seen is None and getattr(statistics, "algorithm", "") != "nearest":
        log(f"{weight.name}: the calibration has nothing of its product's input: rounded to nearest")
    value, after, made = _stored_value(model, weight, rows, scheme, tensor.dtype, seen, spill, names)
    product = made.product_error / made.product_norm if made.product_norm > 0 else None
    for use, _ in uses:
        operand = value
        if use.turned:  # Gemm reads [N, K]
            use.node.attributes["transB"] = ir.AttrInt64("transB", 0)
        use.node.replace_input_with(use.place, operand)
    return QuantizedTensor(
        name=weight.name or "",
        group="dense",
        scheme=str(scheme),
        error=float(np.sqrt(made.error / made.norm)) if made.norm else 0.0,
        bytes_before=tensor.nbytes,
        bytes_after=after,
        calibrated=is_calibrated(scheme, seen),
        product_error=None if product is None else float(np.sqrt(max(0.0, product))),
    )


def _waiting(spill: SpillFile, array: np.ndarray) -> ir.TensorProtocol:
    """A tensor that is on disk until the model is saved."""
    start, shape, dtype = spill.append(array), array.shape, array.dtype
    kind = ir.DataType.from_numpy(dtype)
    return ir.LazyTensor(lambda: ir.tensor(spill.read(start, shape, dtype)), kind, ir.Shape(shape))


def _stored_value(
    model: ir.Model,
    weight: ir.Value,
    rows: np.ndarray,
    scheme: Scheme,
    dtype: ir.DataType,
    seen: Statistics | None,
    spill: SpillFile,
    names: Names,
) -> tuple[ir.Value, int, Quantized]:
    """``[K, N]`` in the weight's own type from the quantized ``[N, K]``, the bytes stored, how it was quantized."""
    try:
        found = quantize_matrix(rows, scheme, dtype.numpy(), seen)
    except ValueError as error:
        raise QuantizeError(f"{weight.name}: {error}") from error
    stem = weight.name or "weight"
    stored = np.ascontiguousarray(found.stored.T)
    if found.scale is None:
        held = add_initializer(model, names, f"{stem}.bfloat16", _waiting(spill, stored))
        node = ir.node("Cast", [held], {"to": int(dtype)}, num_outputs=1, name=names(f"{stem}.cast"))
    else:
        kind = _STORED[scheme.kind]
        held = add_initializer(model, names, f"{stem}.{scheme.kind}", _waiting(spill, stored.astype(kind.numpy())))
        scale = (
            np.repeat(found.scale, scheme.block_rows, axis=0)[: rows.shape[0]] if scheme.block_rows > 1 else found.scale
        )
        blocked = scheme.block_size > 0
        attributes = {"axis": 0, "block_size": min(scheme.block_size, rows.shape[1])} if blocked else {"axis": 1}
        form = (lambda x: np.ascontiguousarray(x.T)) if blocked else (lambda x: x[:, 0])
        operands = [held, add_initializer(model, names, f"{stem}.scale", ir.tensor(form(scale)))]
        if found.zero_point is not None:
            zero = form(found.zero_point).astype(kind.numpy())
            operands.append(add_initializer(model, names, f"{stem}.zero_point", ir.tensor(zero)))
        node = ir.node("DequantizeLinear", operands, attributes, num_outputs=1, name=names(f"{stem}.dequantize"))
    output = node.outputs[0]
    output.name, output.type = names(f"{stem}.dequantized"), ir.TensorType(dtype)
    output.shape = ir.Shape([rows.shape[1], rows.shape[0]])
    first = next(iter(model.graph), None)
    if first is None:
        model.graph.append(node)
    else:
        model.graph.insert_before(first, node)
    sizes = [v.const_value.nbytes for v in node.inputs if v is not None and v.const_value is not None]
    return output, sum(sizes), found
