"""Calls of the op in a model: the node, and the function it calls."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from ..common.function_call import Dim, attach_function, shape_of
from .body import FLOAT, formal_outputs, overload_name
from .spec import ATTRIBUTES, DOMAIN, INPUTS, OP_TYPE, VERSION, KdaConfig


def _batch(config: KdaConfig, inputs: Mapping[str, ir.Value]) -> Dim | None:
    """N, the number of sequences, where the operands' shapes tell it."""
    for name in ("initial_state", "conv_state"):
        shape = inputs[name].shape if name in inputs else None
        if shape is not None:
            return shape[0]
    if config.has_cu_seqlens:
        shape = inputs["cu_seqlens"].shape
        return shape[0] - 1 if shape is not None and isinstance(shape[0], int) else None
    shape = inputs["q"].shape
    return None if shape is None else shape[0]


def make_node(
    config: KdaConfig,
    inputs: Mapping[str, ir.Value],
    dtype: ir.DataType = FLOAT,
    state_dtype: ir.DataType = FLOAT,
    *,
    seq_len: int | None = None,
    name: str | None = None,
) -> ir.Node:
    """A node that calls the function :func:`body.build_function` makes of the same arguments.

    Args:
        config: the call.
        inputs: a value for each of ``config.input_names()``.
        dtype, state_dtype, seq_len: as for ``build_function``.
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
    rows = (None, None) if q_shape is None else (q_shape[0], q_shape[1])
    count = _batch(config, inputs)
    layout = (config.head_dim, config.head_v_dim)
    shapes = {
        "o": shape_of(*rows, config.num_v_heads * config.head_v_dim),
        "present_conv_state": shape_of(count, config.conv_channels, config.conv_state_width),
        "final_state": shape_of(count, config.num_v_heads, *(layout if config.state_layout == "KV" else layout[::-1])),
    }
    asked = config.output_names()
    outputs = []
    for output in formal_outputs(config):
        kind = ir.TensorType(state_dtype if output == "final_state" else dtype)
        present = output in asked
        outputs.append(ir.Value(name=None if present else "", type=kind, shape=shapes[output] if present else None))
    attributes = {
        **{attribute: getattr(config, attribute) for attribute in ATTRIBUTES},
        "state_dtype": int(state_dtype),
    }
    overload = overload_name(config, dtype, state_dtype, seq_len=seq_len)
    return ir.node(OP_TYPE, operands, attributes, domain=DOMAIN, overload=overload, outputs=outputs, name=name)


def attach(model: ir.Model, function: ir.Function) -> None:
    """Put the function into the model, once, and import its domain (see :func:`..common.function_call`)."""
    attach_function(model, function, VERSION)
