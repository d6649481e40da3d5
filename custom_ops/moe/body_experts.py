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
Pick = Callable[[GraphBuilder, str], ir.Value]


def activate(b: GraphBuilder, kind: str, x: ir.Value) -> ir.Value:
    """The activation ``kind`` of spec.ACTIVATIONS, without ops that are newer than opset 18."""
    if kind == "silu":
        return b.mul(x, b.op("Sigmoid", x))
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


def weights(
    b: GraphBuilder, config: MoeConfig, name: str, rows: int, cols: int, operand: Callable[[str], ir.Value]
) -> ir.Value:
    """Float32 ``[rows, cols]`` of the stored matrix ``name``; ``operand`` gives its weight, scale and zero point."""
    kind, (block_size, block_rows), zero_points = config.weights_form(name)
    stored = operand(f"{name}_weight")
    if kind in FOUR_BIT or kind == "float8":
        value = b.op("Gather", b.const(decode_table(kind)), b.cast(stored, ir.DataType.INT32), axis=0)
        if kind in FOUR_BIT:
            value = b.reshape(value, [rows, cols])
    else:
        value = b.cast(stored, FLOAT)
    if kind in PLAIN_FORMATS:
        return value
    size = min(block_size or cols, cols)
    count = -(-cols // size)
    if count * size != cols:
        value = b.op("Pad", value, b.const([0, count * size - cols]), None, b.const([1]))
    value = b.reshape(value, [rows, count, size])
    if zero_points:
        value = b.sub(value, _blocks(b, operand(f"{name}_zero_point"), rows, block_rows))
    value = b.mul(value, _blocks(b, operand(f"{name}_scale"), rows, block_rows))
    value = b.reshape(value, [rows, count * size])
    return value if count * size == cols else b.slice(value, 1, 0, cols)


def expert(
    b: GraphBuilder, config: MoeConfig, x: ir.Value, prefix: str, operand: Callable[[str], ir.Value]
) -> ir.Value:
    """One expert's output ``[n, D]`` of float32 ``[n, D]``; ``prefix`` is "" or "shared_"."""
    hidden = config.hidden_size
    inter = config.shared_intermediate_size if prefix else config.intermediate_size
    joined = 2 * inter if config.gated else inter

    def linear(y: ir.Value, name: str, rows: int, cols: int) -> ir.Value:
        return b.op("Gemm", y, weights(b, config, prefix + name, rows, cols, operand), transB=1)

    mixed = linear(x, "gate_up", joined, hidden)
    if not config.gated:
        return linear(activate(b, config.activation, mixed), "down", hidden, inter)
    gate, up = b.split(mixed, [inter, inter], axis=1)
    if config.clamp == "before" and math.isfinite(config.gate_limit):
        gate = b.op("Min", gate, b.const(float(config.gate_limit)))
    gate = activate(b, config.activation, gate)
    if config.clamp == "after" and math.isfinite(config.gate_limit):
        gate = b.op("Min", gate, b.const(float(config.gate_limit)))
    if config.clamp != "none" and math.isfinite(config.up_limit):
        up = b.op("Clip", up, b.const(-float(config.up_limit)), b.const(float(config.up_limit)))
    return linear(b.mul(gate, up), "down", hidden, inter)
