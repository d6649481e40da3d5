"""The short convolution before the recurrence: its input, its carried state and the state it hands on."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from ...custom_ops.common.refusal import Refusal
from ..graph import GraphView, attribute_int, attribute_ints, attribute_string, is_op


@dataclass(frozen=True)
class ShortConv:
    """A causal depthwise convolution: ``y[t] = sum_i w[i] x[t - width + 1 + i]``.

    ``data`` is x: [B, T, C] when ``channels_last``, else [B, C, T]. ``state`` [B, C, width - 1 or width] precedes x.
    ``present`` is the graph value that hands the last columns on, or None.
    """

    node: ir.Node
    data: ir.Value
    channels_last: bool
    weight: ir.Value
    bias: ir.Value | None
    width: int
    channels: int
    state: ir.Value | None
    present: ir.Value | None
    silu: bool = False  # an activation inside the node itself


def short_conv(view: GraphView, node: ir.Node) -> ShortConv | Refusal:
    """Read a depthwise convolution node; a refusal says what is not causal, or not understood, about it."""
    if node.op_type == "CausalConvWithState":
        return _causal_op(view, node)
    weight = node.inputs[1]
    assert weight is not None and weight.shape is not None
    channels, width = int(weight.shape[0]), int(weight.shape[2])  # type: ignore[arg-type]
    if node.op_type == "FusedConv":
        return Refusal("conv", "a convolution with an activation fused by ONNX Runtime", node.name or "")
    if (attribute_ints(node, "strides") or [1]) != [1] or (attribute_ints(node, "dilations") or [1]) != [1]:
        return Refusal("conv", "the convolution has a stride or a dilation", node.name or "")
    bias = node.inputs[2] if len(node.inputs) > 2 else None
    padded = node.inputs[0]
    assert padded is not None
    state: ir.Value | None = None
    roots = [padded]
    while is_op(padded.producer(), "Cast", "Identity"):
        inner = padded.producer().inputs[0]  # type: ignore[union-attr]
        assert inner is not None
        padded = inner
        roots.append(padded)
    data = padded
    producer = padded.producer()
    if is_op(producer, "Concat") and producer is not None and len(producer.inputs) == 2:
        first, second = producer.inputs
        if first is None or second is None or attribute_int(producer, "axis", 0) not in (-1, 2):
            return Refusal("conv", "the convolution's input is joined along another axis than time", node.name or "")
        data = second
        if not view.is_const(first):
            state = first
        roots.append(second)
    elif is_op(producer, "Pad") and producer is not None and producer.inputs[0] is not None:
        data = producer.inputs[0]
        roots.append(data)
    present = _present(view, roots, node, channels)
    data, last = _channels_last(view, data)
    return ShortConv(node, data, last, weight, bias, width, channels, state, present)


def _causal_op(view: GraphView, node: ir.Node) -> ShortConv | Refusal:
    data, weight = node.inputs[0], node.inputs[1]
    assert data is not None and weight is not None and weight.shape is not None
    if (
        attribute_int(node, "ndim", 1) != 1
        or attribute_int(node, "dilation", 1) != 1
        or attribute_int(node, "state_window", 0)
    ):
        return Refusal("conv", "CausalConvWithState with more than one axis, a dilation or a window", node.name or "")
    bias = node.inputs[2] if len(node.inputs) > 2 else None
    state = node.inputs[3] if len(node.inputs) > 3 else None
    present = node.outputs[1] if len(node.outputs) > 1 else None
    if present is not None and not present.is_graph_output() and not present.uses():
        present = None
    activation = attribute_string(node, "activation", "none")
    if attribute_int(node, "channels_last", 0) == 1:
        if state is not None or present is not None:
            return Refusal("conv", "CausalConvWithState with channels-last states", node.name or "")
        last = True
    else:
        data, last = _channels_last(view, data)
    channels, width = int(weight.shape[0]), int(weight.shape[2])  # type: ignore[arg-type]
    return ShortConv(
        node, data, last, weight, bias, width, channels, state, present, silu=activation in ("silu", "swish")
    )


def _channels_last(view: GraphView, data: ir.Value) -> tuple[ir.Value, bool]:
    """The value before the transpose that brought time to the last axis, if there is one."""
    producer = data.producer()
    if is_op(producer, "Transpose") and producer is not None and attribute_ints(producer, "perm") == [0, 2, 1]:
        inner = producer.inputs[0]
        if inner is not None:
            return inner, True
    return data, False


def _present(view: GraphView, roots: list[ir.Value], conv: ir.Node, channels: int) -> ir.Value | None:
    """A graph output that is cut from the convolution's input: the state to carry on."""
    seen: set[ir.Node] = {conv}
    stack = list(roots)
    while stack:
        value = stack.pop()
        for user in view.users(value):
            if user in seen or not is_op(user, "Slice", "Pad", "Cast", "Identity", "Concat", "Gather"):
                continue
            seen.add(user)
            output = user.outputs[0]
            if output.is_graph_output():
                return output
            stack.append(output)
    return None


def state_width(view: GraphView, conv: ShortConv) -> int | None:
    """Columns of the convolution's states [N, C, width], from their shapes, or from the cut that makes the next one.

    Exporters give the columns a symbol of their own now and then, though only one width can be carried on.
    """
    for value in (conv.state, conv.present):
        if value is not None and value.shape is not None and len(value.shape) == 3 and isinstance(value.shape[2], int):
            return value.shape[2]
    producer = None if conv.present is None else conv.present.producer()
    if is_op(producer, "Slice") and producer is not None:
        starts = view.ints(producer.inputs[1])
        if starts is not None and len(starts) == 1 and starts[0] < 0:
            return -starts[0]
    return None
