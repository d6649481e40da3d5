"""The op by ONNX Runtime's own ``com.microsoft::QMoE``, for calls that deltafuse's kernels refuse.

The function is the portable body with one thing changed: the chosen experts are one node of ONNX Runtime's instead of a
loop. The router stays the body's own, so that the choice is the same to the last bit. On a CPU, QMoE gets ones where an
expert is chosen and zeros elsewhere to choose by, and the weights in ``router_weights``. Its GPU kernels do not look at
that input (seen with ONNX Runtime 1.31.1 on an H200): there ``router_probs`` are the logarithms of the weights, and far
below them where an expert is not chosen; QMoE's softmax gives each weight's share back, whose sum is put in after.
It holds weights with an offset, which those of the op are given by turning over their sign bits; ONNX Runtime does that
once, when it makes the session.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx_ir as ir

from ..common.function_call import attribute_type
from ..common.graph_builder import GraphBuilder
from ..common.refusal import Refusal
from .body import FLOAT, OPSETS, SHORT, _Body, overload_name
from .spec import OP_TYPE, MoeConfig

#: Domain of the functions, and of the nodes that call them.
ORT_FORM_DOMAIN = "deltafuse.ort"
ORT_DOMAIN = "com.microsoft"
ORT_OP = "QMoE"
#: The first ONNX Runtime of which it is known that its QMoE takes ``router_weights`` and weights as models hold them.
MIN_ORT = (1, 32)
#: What an expert that is not chosen gets to be chosen by: no share of a softmax, in float16 too.
_NEVER = -1e4
_BITS = {"int4": 4, "uint4": 4, "int8": 8, "uint8": 8}


def ort_refusal(config: MoeConfig, dtype: ir.DataType = FLOAT, *, on_gpu: bool = False) -> Refusal | None:
    """Why ONNX Runtime's op does not take this call, on the CPU or on a GPU, or None."""
    refused = config.check()
    if refused is not None:
        return refused
    if on_gpu and dtype == FLOAT:
        return Refusal("ort-type", f"x is float32: {ORT_OP} takes 16 bits on a GPU")
    if on_gpu and (config.routed_scaling_factor <= 0 or config.norm_eps < 0):
        numbers = f"routed_scaling_factor {config.routed_scaling_factor}, norm_eps {config.norm_eps}"
        return Refusal("ort-scale", f"{numbers}: {ORT_OP} takes weights above zero on a GPU")
    kind, size = config.weight_format, config.block_size
    if kind not in _BITS:
        return Refusal("ort-format", f"weight_format {kind}: {ORT_OP} is used with integers of 4 and 8 bits")
    if not config.gated or config.activation != "silu":
        shown = f"activation {config.activation}, gated {config.gated}"
        return Refusal("ort-activation", f"{shown}: {ORT_OP} is used with gated SiLU")
    if config.clamp != "none" and config.gate_limit != config.up_limit:
        limits = f"gate_limit {config.gate_limit}, up_limit {config.up_limit}"
        return Refusal("ort-clamp", f"{limits}: {ORT_OP} has one limit for both")
    if config.clamp == "after":  # a GPU's kernel has it; the CPU's, where a node may end up, has not
        return Refusal("ort-clamp", f"clamp after: {ORT_OP} has it on a GPU only")
    if size and (size < 16 or size & (size - 1) or config.hidden_size % size or config.intermediate_size % size):
        sizes = f"hidden_size {config.hidden_size}, intermediate_size {config.intermediate_size}"
        return Refusal("ort-blocks", f"block_size {size}, {sizes}: {ORT_OP} takes whole blocks of 16, 32, 64, ...")
    if kind.startswith("u") and not config.has_zero_point:
        return Refusal("ort-offset", f"weight_format {kind} without zero points: {ORT_OP} takes an offset off then")
    if not size and config.has_zero_point:
        return Refusal("ort-blocks", f"zero points of whole rows: {ORT_OP} is used with those of blocks")
    if size and _BITS[kind] == 8:  # in a session on a GPU too the node may end up there
        return Refusal(
            "ort-accuracy", f"weight_format {kind} in blocks: {ORT_OP} rounds activations to 8 bits on a CPU"
        )
    return None


class _OrtBody(_Body):
    """The portable body with ORT's op for the routed experts, on a CPU in float32 whatever T is."""

    def __init__(self, config: MoeConfig, dtype: ir.DataType, on_gpu: bool) -> None:
        super().__init__(config, dtype)
        self.on_gpu, self.inner = on_gpu, dtype if on_gpu else FLOAT

    def routed(self, b: GraphBuilder, x: ir.Value, ids: ir.Value, weights: ir.Value) -> ir.Value:
        config, own = self.config, self.config.own_experts
        shape = b.concat([b.dim(ids, 0), b.const([config.num_experts])], 0)
        zeros = b.op("Expand", b.const(np.zeros((1, 1), np.float32)), shape)
        dense = b.op("ScatterElements", zeros, ids, weights, axis=1)
        if config.zero_experts:
            dense, given = b.split(dense, [own, config.zero_experts], axis=1)
        if self.on_gpu:
            chosen, total = self._logits(b, dense)
        else:
            ones = b.op("ConstantOfShape", b.op("Shape", ids), value=ir.tensor(np.ones(1, np.float32)))
            chosen = b.slice(b.op("ScatterElements", zeros, ids, ones, axis=1), 1, 0, own)
        operands: list[ir.Value | None] = [self._cast(b, x), self._cast(b, chosen)]
        for name in ("gate_up", "down"):
            operands += [self._stored(b, name), self._cast(b, self._ordered(b, f"{name}_scale"))]
            has_bias = config.has_gate_up_bias if name == "gate_up" else config.has_down_bias
            operands.append(self._cast(b, self._ordered(b, f"{name}_bias")) if has_bias else None)
        operands += [None, None, None]
        operands += [self._zeros(b, name) for name in ("gate_up", "down")] if config.has_zero_point else [None, None]
        if not self.on_gpu:
            operands += [None, self._cast(b, dense)]
        attributes: dict[str, Any] = {
            "k": min(config.top_k, own),
            "activation_type": "swiglu",
            "swiglu_fusion": 1,
            "activation_alpha": float(config.activation_alpha),
            "activation_beta": float(config.up_offset),
            "expert_weight_bits": _BITS[config.weight_format],
            "normalize_routing_weights": int(self.on_gpu),
            "weights_prepacked": 0,
            "accuracy_level": 1,
        }
        if config.block_size:
            attributes["block_size"] = config.block_size
        if config.clamp != "none" and math.isfinite(config.gate_limit):
            attributes["swiglu_limit"] = float(config.gate_limit)
        node = ir.node(ORT_OP, operands, attributes, domain=ORT_DOMAIN, num_outputs=1, name=b.fresh("n_experts"))
        node.outputs[0].name = b.fresh("experts")
        b.nodes.append(node)
        y = b.cast(node.outputs[0], FLOAT)
        if self.on_gpu:
            y = b.mul(y, total)
        if config.zero_experts:
            y = b.add(y, b.mul(x, b.sum_last(given)))
        return y

    def _logits(self, b: GraphBuilder, dense: ir.Value) -> tuple[ir.Value, ir.Value]:
        """What softmax makes each weight's share of, and the weights' sum ``[N, 1]``; a weight of 0 is not chosen."""
        tiny = b.const(float(np.finfo(np.float32).tiny))
        largest = b.op("Max", b.op("ReduceMax", dense, b.const([-1]), keepdims=1), tiny)
        shares = b.op("Log", b.op("Max", b.op("Div", dense, largest), tiny))
        logits = b.op("Where", b.op("Greater", dense, b.const(0.0)), shares, b.const(_NEVER))
        return logits, b.sum_last(dense)

    def _cast(self, b: GraphBuilder, value: ir.Value) -> ir.Value:
        return b.cast(value, self.inner)

    def _ordered(self, b: GraphBuilder, name: str) -> ir.Value:
        """An operand with the rows of gate and up in turn: QMoE's CPU kernel has them in no other order."""
        value, inter = self.inputs[name], self.config.intermediate_size
        if not name.startswith("gate_up"):
            return value
        return b.op("Gather", value, b.const(np.arange(2 * inter).reshape(2, inter).T.reshape(-1)), axis=1)

    def _stored(self, b: GraphBuilder, name: str) -> ir.Value:
        """Weights as unsigned numbers with the offset that QMoE takes off."""
        kind, value = self.config.weight_format, self._ordered(b, f"{name}_weight")
        if kind == "int4":
            return b.op("BitwiseXor", value, b.const(0x88, np.uint8))
        if kind == "int8":
            wide = b.add(b.cast(value, ir.DataType.INT32), b.const(128, np.int32))
            return b.cast(wide, ir.DataType.UINT8)
        return value

    def _zeros(self, b: GraphBuilder, name: str) -> ir.Value:
        """Zero points with the same offset, those of 4-bit weights two in a byte, a short last one filled up."""
        kind, value = self.config.weight_format, self._ordered(b, f"{name}_zero_point")
        offset = {"int4": 8, "int8": 128}.get(kind, 0)
        wide = b.cast(value, ir.DataType.INT32)
        if offset:
            wide = b.add(wide, b.const(offset, np.int32))
        if _BITS[kind] == 4:
            cols = self.config.hidden_size if name == "gate_up" else self.config.intermediate_size
            blocks = cols // self.config.block_size
            if blocks % 2:
                wide = b.op("Pad", wide, b.const([0, 1]), None, b.const([2]))
            ends, one, two = b.const([np.iinfo(np.int64).max]), b.const([2]), b.const([2])
            low, high = (b.op("Slice", wide, b.const([i]), ends, one, two) for i in (0, 1))
            wide = b.add(low, b.mul(high, b.const(16, np.int32)))
        return b.cast(wide, ir.DataType.UINT8)


def build_ort_function(
    config: MoeConfig, opset: int, dtype: ir.DataType = FLOAT, *, on_gpu: bool = False
) -> ir.Function:
    """The function, with the arguments and formal operands of :func:`.body.build_function`.

    Raises:
        ValueError: ONNX Runtime's op does not take the call, or the opset is not one that the body is written for.
    """
    refused = ort_refusal(config, dtype, on_gpu=on_gpu)
    if refused is not None:
        raise ValueError(str(refused))
    if opset not in OPSETS or dtype not in SHORT:
        raise ValueError(f"opset {opset}, dtype {dtype!r}: the body is written for {OPSETS[0]} to {OPSETS[-1]}")
    body = _OrtBody(config, dtype, on_gpu)
    outputs = body.build()
    graph = body.builder.graph(list(body.inputs.values()), outputs, opset)
    graph.opset_imports[ORT_DOMAIN] = 1
    declared = [ir.Attr(name, attribute_type(value), None) for name, value in config.attributes().items()]
    return ir.Function(ORT_FORM_DOMAIN, OP_TYPE, overload_name(config, dtype), graph=graph, attributes=declared)
