"""Parts of the body that compute one expert: stored weights to float32, and the expert's layers."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from ..common.graph_builder import GraphBuilder
from .packing import FOUR_BIT, decode_table
from .spec import PLAIN_FORMATS, MoeConfig

FLOAT = ir.DataType.FLOAT
#: Gives a weight, scale or zero point by its input's name.
Operand = Callable[[str], ir.Value]


def activate(b: GraphBuilder, kind: str, x: ir.Value, alpha: float = 1.0) -> ir.Value:
    """The activation ``kind`` of spec.ACTIVATIONS, without ops that are newer than opset 18."""
    if kind == "silu":
        return b.mul(x, b.op("Sigmoid", x if alpha == 1.0 else b.mul(x, b.const(float(alpha)))))
    if kind == "relu2":
        y = b.op("Relu", x)
        return b.mul(y, y)
    half = b.mul(x, b.const(0.5))
    if kind == "gelu":
        return b.mul(half, b.add(b.op("Erf", b.mul(x, b.const(math.sqrt(0.5)))), b.const(1.0)))
    cube = b.mul(b.mul(x, x), x)
    inner = b.mul(b.add(x, b.mul(cube, b.const(0.044715))), b.const(math.sqrt(2.0 / math.pi)))
    return b.mul(half, b.add(b.op("Tanh", inner), b.const(1.0)))


def _blocks(b: GraphBuilder, of_blocks: ir.Value, rows: int, block_rows: int) -> ir.Value:
    """Numbers of blocks ``[ceil(rows / block_rows), n]`` as float32 ``[rows, n, 1]``."""
    wide = b.cast(of_blocks, FLOAT)
    if block_rows != 1:
        wide = b.op("Gather", wide, b.const(np.arange(rows) // block_rows), axis=0)
    return b.unsqueeze(wide, 2)


def _scaled(
    b: GraphBuilder, config: MoeConfig, name: str, value: ir.Value, rows: int, operand: Operand, halved: int = 1
) -> ir.Value:
    """``(value - zero point) * scale`` of float32 ``[rows, cols / halved]``: with 2, every other column."""
    kind, (block_size, block_rows), zero_points = config.weights_form(name)
    inter = config.shared_intermediate_size if name.startswith("shared_") else config.intermediate_size
    cols = inter if name.endswith("down") else config.hidden_size
    size = min(block_size or cols, cols)
    count = -(-cols // size)
    width, size = cols // halved, size // halved
    if count * size != width:
        value = b.op("Pad", value, b.const([0, count * size - width]), None, b.const([1]))
    value = b.reshape(value, [rows, count, size])
    middle = 8.0 if kind == "int4" else 0.0  # see _halves
    if zero_points:
        zero = _blocks(b, operand(f"{name}_zero_point"), rows, block_rows)
        value = b.sub(value, b.add(zero, b.const(middle)) if middle else zero)
    elif middle:
        value = b.sub(value, b.const(middle))
    value = b.mul(value, _blocks(b, operand(f"{name}_scale"), rows, block_rows))
    value = b.reshape(value, [rows, count * size])
    return value if count * size == width else b.slice(value, 1, 0, width)


def _halves(b: GraphBuilder, kind: str, stored: ir.Value) -> tuple[ir.Value, ir.Value]:
    """The numbers of even and of odd columns as float32; an int4 with its sign bit turned over is the number plus 8."""
    if kind == "int4":
        stored = b.op("BitwiseXor", stored, b.const(0x88, np.uint8))
    low = b.op("BitwiseAnd", stored, b.const(0x0F, np.uint8))
    high = b.op("BitShift", stored, b.const(4, np.uint8), direction="RIGHT")
    return b.cast(low, FLOAT), b.cast(high, FLOAT)


def linear(b: GraphBuilder, config: MoeConfig, x: ir.Value, name: str, rows: int, operand: Operand) -> ir.Value:
    """``x`` float32 ``[n, cols]`` times the stored matrix ``name`` ``[rows, cols]``, plus its bias: ``[n, rows]``.

    ``operand`` gives the matrix's weight, scale, zero point and bias.
    """
    bias = operand(f"{name}_bias") if f"{name}_bias" in config.input_names() else None
    kind = config.weights_form(name)[0]
    stored = operand(f"{name}_weight")
    if kind in FOUR_BIT:  # even and odd columns apart: nothing has to be interleaved
        total = bias
        for place, half in enumerate(_halves(b, kind, stored)):
            end = b.const([np.iinfo(np.int64).max])
            part = b.op("Slice", x, b.const([place]), end, b.const([1]), b.const([2]))
            total = b.op("Gemm", part, _scaled(b, config, name, half, rows, operand, 2), total, transB=1)
        assert total is not None
        return total
    if kind == "float8":
        value = b.op("Gather", b.const(decode_table(kind)), b.cast(stored, ir.DataType.INT32), axis=0)
    else:
        value = b.cast(stored, FLOAT)
    if kind not in PLAIN_FORMATS:
        value = _scaled(b, config, name, value, rows, operand)
    return b.op("Gemm", x, value, bias, transB=1)


def expert(b: GraphBuilder, config: MoeConfig, x: ir.Value, prefix: str, operand: Operand) -> ir.Value:
    """One expert's output ``[n, D]`` of float32 ``[n, D]``; ``prefix`` is "" or "shared_"."""
    hidden = config.hidden_size
    inter = config.shared_intermediate_size if prefix else config.intermediate_size
    joined = 2 * inter if config.gated else inter
    mixed = linear(b, config, x, f"{prefix}gate_up", joined, operand)
    if not config.gated:
        acted = activate(b, config.activation, mixed, config.activation_alpha)
        return linear(b, config, acted, f"{prefix}down", hidden, operand)
    gate, up = b.split(mixed, [inter, inter], axis=1)
    if config.clamp == "before" and math.isfinite(config.gate_limit):
        gate = b.op("Min", gate, b.const(float(config.gate_limit)))
    gate = activate(b, config.activation, gate, config.activation_alpha)
    if config.clamp == "after" and math.isfinite(config.gate_limit):
        gate = b.op("Min", gate, b.const(float(config.gate_limit)))
    if config.clamp != "none" and math.isfinite(config.up_limit):
        up = b.op("Clip", up, b.const(-float(config.up_limit)), b.const(float(config.up_limit)))
    if config.up_offset:
        up = b.add(up, b.const(float(config.up_offset)))
    return linear(b, config, b.mul(gate, up), f"{prefix}down", hidden, operand)
