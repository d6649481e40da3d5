"""Small parts of the function body: norm and rotary embedding."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from ..common.graph_builder import GraphBuilder
from .spec import MlaConfig

FLOAT = ir.DataType.FLOAT
#: Beyond every index: ONNX counts negative ones from the end, the op calls them errors.
OUT_OF_RANGE = 1 << 40


def not_negative(b: GraphBuilder, index: ir.Value) -> ir.Value:
    """int64 indices; negative ones become ones that no tensor has, so that the runtime reports them."""
    return b.op("Where", b.op("Less", index, b.const(0)), b.const(OUT_OF_RANGE), index)


def rms_norm(b: GraphBuilder, x: ir.Value, weight: ir.Value, eps: float) -> ir.Value:
    mean = b.op("ReduceMean", b.mul(x, x), b.const([-1]), keepdims=1)
    return b.mul(b.op("Div", x, b.op("Sqrt", b.add(mean, b.const(float(eps))))), weight)


def angles(b: GraphBuilder, config: MlaConfig, inputs: Mapping[str, ir.Value]) -> tuple[ir.Value, ir.Value]:
    """cos and sin of the new tokens, float32 [B or 1, S, W]."""
    found = []
    for name in ("cos", "sin"):
        value = inputs[name]
        if config.has_position_ids:
            value = b.op("Gather", value, not_negative(b, inputs["position_ids"]), axis=0)
        found.append(b.cast(value, FLOAT))
    return found[0], found[1]


def rotate(b: GraphBuilder, config: MlaConfig, x: ir.Value, cos: ir.Value, sin: ir.Value, rank: int) -> ir.Value:
    """Rotary embedding of the last axis of ``x``, of ``rank`` dimensions like cos and sin."""
    half = config.qk_rope_head_dim // 2
    keep = [0] * (rank - 1)

    def halves(y: ir.Value) -> tuple[ir.Value, ir.Value]:
        first, second = b.split(y, [half, half], axis=rank - 1)
        return first, second

    def pairs(y: ir.Value) -> tuple[ir.Value, ir.Value]:
        first, second = b.split(b.reshape(y, [*keep, half, 2]), [1, 1], axis=rank)
        return b.squeeze(first, rank), b.squeeze(second, rank)

    first, second = halves(x) if config.rope == "half" else pairs(x)
    if config.cos_width == half:
        (cos_a, cos_b), (sin_a, sin_b) = (cos, cos), (sin, sin)
    else:
        places = pairs if config.rope == "interleaved" else halves
        (cos_a, cos_b), (sin_a, sin_b) = places(cos), places(sin)
    a = b.sub(b.mul(first, cos_a), b.mul(second, sin_a))
    c = b.add(b.mul(second, cos_b), b.mul(first, sin_b))
    if config.rope != "interleaved":
        return b.concat([a, c], axis=rank - 1)
    both = b.concat([b.unsqueeze(a, rank), b.unsqueeze(c, rank)], axis=rank)
    return b.reshape(both, [*keep, config.qk_rope_head_dim])
