"""Calls of the op in a model: the node, and the function it calls."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from ..common.function_call import Dim, attach_function, shape_of
from .body import FLOAT, formal_outputs, overload_name
from .spec import ATTRIBUTES, DOMAIN, INPUTS, OP_TYPE, VERSION, MlaConfig

_PASTS = {
    "present_latent": ("past_latent", 1),
    "present_k_rope": ("past_k_rope", 1),
    "present_latent_scale": ("past_latent_scale", 1),
    "present_key": ("past_key", 2),
    "present_value": ("past_value", 2),
}


def _fresh_shape(config: MlaConfig, output: str, batch: Dim | None, tokens: Dim | None) -> ir.Shape:
    """Shape of a cache that starts with this call."""
    rope = config.qk_rope_head_dim
    if output == "present_key":
        return shape_of(batch, config.num_heads, tokens, config.qk_head_dim)
    if output == "present_value":
        return shape_of(batch, config.num_heads, tokens, config.v_head_dim)
    if output == "present_k_rope":
        return shape_of(batch, tokens, rope)
    return shape_of(batch, tokens, config.kv_lora_rank + (rope if config.packed_cache else 0))


def _present_shape(
    config: MlaConfig, output: str, inputs: Mapping[str, ir.Value], tokens: Dim | None
) -> ir.Shape | None:
    """Shape of a cache after the call, as far as the operands' shapes tell it."""
    past, axis = _PASTS[output]
    if past not in inputs:
        q_shape = inputs["q"].shape
        return _fresh_shape(config, output, None if q_shape is None else q_shape[0], tokens)
    shape = inputs[past].shape
    if shape is None:
        return None
    dims: list[Dim | None] = list(shape)
    if not config.static_cache:
        there = dims[axis]
        dims[axis] = there + tokens if isinstance(there, int) and isinstance(tokens, int) else None
    return shape_of(*dims)


def make_node(
    config: MlaConfig,
    inputs: Mapping[str, ir.Value],
    dtype: ir.DataType = FLOAT,
    *,
    seq_len: int | None = None,
    name: str | None = None,
) -> ir.Node:
    """A node that calls the function :func:`body.build_function` makes of the same arguments.

    Args:
        config: the call.
        inputs: a value for each of ``config.input_names()``.
        dtype, seq_len: as for ``build_function``.
        name: the node's name.

    Returns:
        The node, in no graph yet. Its outputs are those of ``body.formal_outputs``, with type and shape set; one that
        is not asked for has the name "" (an omitted output), the others have no name yet.

    Raises:
        ValueError: the names in ``inputs`` are not those of the configuration.
    """
    if set(inputs) != set(config.input_names()):
        raise ValueError(f"inputs {sorted(inputs)}: expected {sorted(config.input_names())}")
    operands = [inputs.get(operand) for operand in INPUTS]
    while operands[-1] is None:
        operands.pop()
    q_shape = inputs["q"].shape
    batch, tokens = (None, seq_len) if q_shape is None else (q_shape[0], q_shape[1])
    asked = config.output_names()
    codes = {"int8": ir.DataType.INT8, "float8": ir.DataType.FLOAT8E4M3FN}
    types = {"present_latent": codes.get(config.cache_type, dtype), "present_latent_scale": FLOAT}
    outputs = []
    for output in formal_outputs(config):
        shape = None
        if output == "o":
            shape = shape_of(batch, tokens, config.num_heads * config.v_head_dim)
        elif output in asked:
            shape = _present_shape(config, output, inputs, tokens)
        name_of = None if output in asked else ""
        outputs.append(ir.Value(name=name_of, type=ir.TensorType(types.get(output, dtype)), shape=shape))
    attributes = {attribute: getattr(config, attribute) for attribute in ATTRIBUTES}
    overload = overload_name(config, dtype, seq_len=seq_len)
    return ir.node(OP_TYPE, operands, attributes, domain=DOMAIN, overload=overload, outputs=outputs, name=name)


def attach(model: ir.Model, function: ir.Function) -> None:
    """Put the function into the model, once, and import its domain (see :func:`..common.function_call`)."""
    attach_function(model, function, VERSION)
