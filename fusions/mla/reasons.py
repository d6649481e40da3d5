"""Why an attention that looks like latent attention is none that the op takes, in words."""

from __future__ import annotations

import onnx_ir as ir

from ...custom_ops.common.refusal import Refusal
from ..cleanup.rms_norm import rms_norm_of
from ..graph import GraphView, is_op, rank_of, static_dims
from .flow import Flow, is_normed, unmoved, walk
from .parts import base_of, latent_of, linear_weight


def normed_heads(view: GraphView, k_flow: Flow, v_flow: Flow) -> Refusal | None:
    """Keys or values with a norm behind the layer that makes them of latents: those of each head, and a rotary part."""
    for what, flow in (("keys", k_flow), ("values", v_flow)):
        normed = [leaf for leaf in flow.leaves if rank_of(leaf) == 4 and is_normed(view, leaf)]
        if normed and _of_latents(view, _under_norm(view, normed[0])):
            return Refusal("norm", f"{what} are normalised head by head behind the latents' layer; the op does not")
    return None


def _under_norm(view: GraphView, value: ir.Value) -> ir.Value:
    """What a norm normalises, before its weight."""
    while (norm := rms_norm_of(value)) is None:
        node = value.producer()
        data = [] if node is None else [v for v in node.inputs if v is not None and not view.is_const(v)]
        if len(data) != 1:
            return value
        value = data[0]
    return norm.x


def _of_latents(view: GraphView, value: ir.Value) -> bool:
    """Is it made by a layer over a normalised latent narrower than what the layer gives, itself a layer's result and no
    stream of residuals?"""
    for leaf in walk(view, value).leaves:
        layer = linear_weight(view, base_of(view, leaf))
        dims = None if layer is None else static_dims(layer[2])
        if layer is None or dims is None or dims[0] is None or dims[1] is None:
            continue
        rank, wide = dims[::-1] if layer[3] else dims
        latent = latent_of(view, layer[1], rank or 0)
        if latent.epsilon is not None and (rank or 0) < (wide or 0):
            if linear_weight(view, base_of(view, latent.raw)) is not None:
                return True
    return False


def other_layer(view: GraphView, k_flow: Flow, v_flow: Flow) -> Refusal | None:
    """Why a layer that keys and values share, beside rotary keys, is no kv_b that the op takes."""
    lost = v_flow.lost or k_flow.lost
    if lost is not None and len(k_flow.leaves) > 1:
        if any(v is not None and _of_latents(view, v) for v in lost.inputs):
            return Refusal("flow", f"{lost.op_type} between the latents' layer and the attention")
    if len(v_flow.leaves) != 1 or len(k_flow.leaves) != 2:
        return None
    leaf = next(iter(v_flow.leaves))
    if leaf in k_flow.leaves and v_flow.weights and k_flow.weights:
        kind = v_flow.weights[0][0].op_type
        return Refusal(
            "weights", f"keys and values are made of latents by weights of three axes ({kind}), not a MatMul"
        )
    if _biased(view, leaf) is not None and any(_biased(view, k) is _biased(view, leaf) for k in k_flow.leaves):
        return Refusal("bias", "the layers that make keys and values of latents have biases; the op has none there")
    cut = leaf.producer()
    base = cut.inputs[0] if is_op(cut, "Split", "Slice") and cut is not None else leaf
    shared = [k for k in k_flow.leaves if k is base or (k.producer() is not None and base in k.producer().inputs)]  # type: ignore[union-attr]
    producer = None if base is None else base.producer()
    if len(shared) != 1 or producer is None:
        return None
    if view.weight_of(producer) is not None or is_op(producer, "Add"):
        return Refusal("bias", "the layer that makes keys and values of latents has a bias; the op has none there")
    if view.is_linear(producer):
        return Refusal(
            "quantized",
            f"the layer that makes keys and values of latents is a {producer.op_type}: the op reads its weight as a "
            "tensor; give it as DequantizeLinear in front of a MatMul, or quantize behind fusing (--quantize)",
        )
    return None


def turned_cache(view: GraphView, value: ir.Value) -> Refusal | None:
    """A cache of normalised latents that lies otherwise than [batch, tokens, channels]."""
    joined = unmoved(view, value).producer()
    if joined is not None and is_op(joined, "Transpose") and joined.inputs[0] is not None:
        joined = joined.inputs[0].producer()
    if joined is None or not is_op(joined, "Concat") or len(joined.inputs) != 2:
        return None
    past, new = joined.inputs
    if past is None or new is None or past.producer() is not None or view.is_const(past):
        return None
    while (node := new.producer()) is not None and is_op(node, "Transpose", "Reshape", "Cast") and node.inputs[0]:
        new = node.inputs[0]
    return Refusal("cache", "a cache of latents in another layout") if is_normed(view, new) else None


def _biased(view: GraphView, leaf: ir.Value) -> ir.Value | None:
    """What a linear layer with a bias reads."""
    node = leaf.producer()
    if is_op(node, "Add") and node is not None:
        layers = [v.producer() for v in node.inputs if v is not None and not view.is_const(v)]
        node = layers[0] if len(layers) == 1 else None
    elif not is_op(node, "Gemm") or node is None or len(node.inputs) < 3:
        return None
    if node is None or view.weight_of(node) is None or node.inputs[0] is None:
        return None
    return unmoved(view, node.inputs[0])


def query_refusal(q_flow: Flow, k_flow: Flow, v_flow: Flow) -> Refusal:
    lost = next((f.lost for f in (q_flow, k_flow, v_flow) if f.lost is not None), None)
    if lost is not None:
        return Refusal("flow", f"{lost.op_type} between the projections and the attention")
    if len(q_flow.leaves) > 1:
        return Refusal("queries", f"queries are made of {len(q_flow.leaves)} parts")
    return Refusal("queries", "products of parts of queries and keys that were joined before")
