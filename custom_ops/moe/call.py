"""Calls of the op in a model: the node, and the function it calls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import onnx_ir as ir

from ..common.function_call import attach_function
from .body import FLOAT, SHORT, formal_outputs, overload_name
from .spec import ATTRIBUTES, BIASES, DOMAIN, INPUTS, LATER, OP_TYPE, VERSION, MoeConfig


def _tokens(x: ir.Shape | None) -> int | ir.SymbolicDim:
    """N, where the shape of x tells it."""
    if x is None:
        return ir.SymbolicDim(None)
    if len(x) == 2:
        return x[0]
    if all(isinstance(dim, int) for dim in x[:2]):
        return int(x[0]) * int(x[1])  # type: ignore[arg-type]
    return ir.SymbolicDim(None)


def make_node(
    config: MoeConfig,
    inputs: Mapping[str, ir.Value],
    dtype: ir.DataType = FLOAT,
    *,
    name: str | None = None,
) -> ir.Node:
    """A node that calls the function :func:`body.build_function` makes of the same arguments.

    Args:
        config: the call.
        inputs: a value for each of ``config.input_names()``.
        dtype: as for ``build_function``.
        name: the node's name.

    Returns:
        The node, in no graph yet. Its outputs are those of ``body.formal_outputs``, with type and shape set and no
        name yet.

    Raises:
        ValueError: the names in ``inputs`` are not those of the configuration.
    """
    if set(inputs) != set(config.input_names()):
        raise ValueError(f"inputs {sorted(inputs)}: expected {sorted(config.input_names())}")
    operands = [inputs.get(operand) for operand in INPUTS]
    while operands[-1] is None:
        operands.pop()
    shape = inputs["x"].shape
    chosen = ir.Shape([_tokens(shape), config.top_k])
    forms = {
        "y": (dtype, None if shape is None else ir.Shape(shape)),
        "expert_ids": (ir.DataType.INT64, chosen),
        "expert_weights": (FLOAT, chosen),
    }
    outputs = []
    for output in formal_outputs(config):
        kind, form = forms[output]
        outputs.append(ir.Value(type=ir.TensorType(kind), shape=form))
    overload = overload_name(config, dtype)
    return ir.node(OP_TYPE, operands, config.attributes(), domain=DOMAIN, overload=overload, outputs=outputs, name=name)


def read_call(node: ir.Node) -> tuple[MoeConfig, ir.DataType]:
    """The configuration and T of a node that :func:`make_node` made.

    Raises:
        ValueError: another node, or one whose attributes are not this version's.
    """
    suffix = node.overload.rpartition("-")[2]
    dtypes = [dtype for dtype, short in SHORT.items() if short == suffix]
    if (node.domain, node.op_type) != (DOMAIN, OP_TYPE) or not dtypes:
        raise ValueError(f"node {node.name!r} is no call of {DOMAIN}::{OP_TYPE}")
    have = {name for name, value in zip(INPUTS, node.inputs, strict=False) if value is not None}
    values: dict[str, Any] = {}
    for name in ATTRIBUTES:
        if name not in node.attributes:
            if name in LATER:
                continue
            raise ValueError(f"node {node.name!r} has no attribute {name}: another version of {OP_TYPE}")
        values[name] = node.attributes[name].value
    values |= {f"has_{name}": name in have for name in BIASES}
    config = MoeConfig(
        **values,
        has_zero_point="gate_up_zero_point" in have,
        shared_has_zero_point="shared_gate_up_zero_point" in have,
        has_router_weight="router_weight" in have,
        has_router_bias="router_bias" in have,
        has_expert_bias="expert_bias" in have,
        has_shared_gate="shared_gate_weight" in have,
        has_ids=len(node.outputs) > 1,
    )
    return config, dtypes[0]


def attach(model: ir.Model, function: ir.Function) -> None:
    """Put the function into the model, once, and import its domain (see :func:`..common.function_call`)."""
    attach_function(model, function, VERSION)
