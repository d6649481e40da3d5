"""The op by ONNX Runtime's own ``com.microsoft::LinearAttention``, for calls that deltafuse's kernels refuse.

The function is the portable body with one thing changed: the recurrence is one node of ONNX Runtime's instead of a
chunked computation in standard ops. It has a domain of its own, so that the plugin EP does not take it for a call of
the op. ONNX Runtime inlines it and runs the node on whichever of its own execution providers has a kernel.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from ..common.function_call import attribute_type
from ..common.graph_builder import GraphBuilder
from ..common.refusal import Refusal
from .body import FLOAT, OPSETS, SHORT, _Body, overload_name
from .spec import ATTRIBUTES, OP_TYPE, KdaConfig

#: Domain of the functions, and of the nodes that call them.
ORT_FORM_DOMAIN = "deltafuse.ort"
ORT_DOMAIN = "com.microsoft"
ORT_OP = "LinearAttention"
#: ORT's CUDA kernel keeps a head's state in shared memory. So much has every GPU from compute capability 8.0 on.
SHARED_BYTES = 99 * 1024
MAX_HEAD_DIM = 512


def ort_refusal(config: KdaConfig, *, on_gpu: bool = False) -> Refusal | None:
    """Why ONNX Runtime's op does not take this call, on the CPU or on a GPU, or None."""
    refused = config.check()
    if refused is not None:
        return refused
    if config.has_cu_seqlens:
        return Refusal("ort-cu-seqlens", f"{ORT_OP} takes no sequences of their own lengths (cu_seqlens)")
    key_dim, value_dim = config.head_dim, config.head_v_dim
    sizes = f"head_dim {key_dim}, head_v_dim {value_dim}"
    if max(key_dim, value_dim) > MAX_HEAD_DIM:
        return Refusal("ort-head-dim", f"{sizes}: {ORT_OP} is used up to {MAX_HEAD_DIM}")
    needed = 4 * (key_dim * value_dim + key_dim + max(key_dim, value_dim))
    if on_gpu and needed > SHARED_BYTES:
        shared = f"{needed} bytes of shared memory on a GPU, {SHARED_BYTES} are there everywhere"
        return Refusal("ort-shared-memory", f"{sizes}: {ORT_OP} needs {shared}")
    return None


class _OrtBody(_Body):
    """The portable body with ORT's op as its recurrence."""

    def recurrence(
        self,
        b: GraphBuilder,
        q: ir.Value,
        k: ir.Value,
        v: ir.Value,
        g: ir.Value,
        beta: ir.Value,
        state: ir.Value,
    ) -> tuple[ir.Value, ir.Value]:
        config, repeats = self.config, self.repeats
        heads, v_heads = config.num_heads, config.num_v_heads
        key_dim, value_dim = config.head_dim, config.head_v_dim
        if repeats > 1:  # one query and key head for each value head
            every = b.const([1, 1, 1, repeats, 1])
            q, k = b.op("Expand", q, every), b.op("Expand", k, every)
        operands = [
            b.reshape(q, [0, 0, v_heads * key_dim]),
            b.reshape(k, [0, 0, v_heads * key_dim]),
            b.reshape(v, [0, 0, v_heads * value_dim]),
            b.reshape(state, [0, v_heads, key_dim, value_dim]),
            b.reshape(g, [0, 0, v_heads * key_dim]),
            b.reshape(beta, [0, 0, v_heads]),
        ]
        counts = {"q_num_heads": v_heads, "kv_num_heads": v_heads}
        attributes: dict[str, Any] = {**counts, "scale": 1.0, "update_rule": "gated_delta"}
        node = ir.node(ORT_OP, operands, attributes, domain=ORT_DOMAIN, num_outputs=2, name=b.fresh("n_attention"))
        for output in node.outputs:
            output.name = b.fresh("attention")
        b.nodes.append(node)
        o, after = node.outputs
        return (
            b.reshape(o, [0, 0, heads, repeats, value_dim]),
            b.reshape(after, [0, heads, repeats, key_dim, value_dim]),
        )


def build_ort_function(
    config: KdaConfig,
    opset: int,
    dtype: ir.DataType = FLOAT,
    state_dtype: ir.DataType = FLOAT,
    *,
    seq_len: int | None = None,
) -> ir.Function:
    """The function ``deltafuse.ort::KimiDeltaAttention`` for one configuration.

    Args and inputs, outputs and attributes of the function are those of ``body.build_function``. It is float32 inside.

    Raises:
        ValueError: ORT's op does not take the configuration, or the opset or a dtype is not one the op defines.
    """
    refused = ort_refusal(config)
    if refused is not None:
        raise ValueError(str(refused))
    if opset not in OPSETS or dtype not in SHORT or state_dtype not in SHORT:
        raise ValueError(f"opset {opset}, types {dtype!r} and {state_dtype!r}: not ones that the op defines")
    body = _OrtBody(config, dtype, state_dtype, seq_len)
    outputs = body.build()
    graph = body.builder.graph(list(body.inputs.values()), outputs, opset)
    graph.opset_imports[ORT_DOMAIN] = 1
    declared = [ir.Attr(name, attribute_type(getattr(config, name)), None) for name in ATTRIBUTES]
    declared.append(ir.Attr("state_dtype", ir.AttributeType.INT, None))
    overload = overload_name(config, dtype, state_dtype, seq_len=seq_len)
    return ir.Function(ORT_FORM_DOMAIN, OP_TYPE, overload, graph=graph, attributes=declared)
