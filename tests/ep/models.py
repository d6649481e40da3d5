"""Models around a call of the op: other nodes before and after it, parameters as initializers."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import onnxruntime as ort
from deltafuse.custom_ops.kda.spec import KdaConfig
from onnx import helper, numpy_helper

from .call import SMALL, Arrays, call_model

#: As SMALL, with head dims that the CUDA kernels take.
LAYER = replace(SMALL, head_dim=64, head_v_dim=64, scale=0.125)

#: Operands that are a layer's parameters, not its activations.
PARAMETERS = ("A_log", "dt_bias", "conv_weight", "conv_bias", "norm_weight")


def layer_model(config: KdaConfig, inputs: Arrays, **types: Any) -> onnx.ModelProto:
    """``o = 2 * op(-q, ...)`` with the op's parameters as initializers: nodes of another EP on both sides of the call.

    Negating q and doubling gives an output that is easy to compare: see :func:`as_layer`.
    """
    model = call_model(config, inputs, **types)
    graph = model.graph
    parameters = [name for name in PARAMETERS if name in inputs]
    kept = [value for value in graph.input if value.name not in parameters]
    del graph.input[:]
    graph.input.extend(kept)
    graph.initializer.extend(numpy_helper.from_array(inputs[name], name) for name in parameters)
    graph.initializer.append(numpy_helper.from_array(inputs["A_log"].dtype.type(2), "two"))
    for node in graph.node:
        node.input[:] = ["q_negated" if name == "q" else name for name in node.input]
        node.output[:] = ["o_once" if name == "o" else name for name in node.output]
    graph.node.insert(0, helper.make_node("Neg", ["q"], ["q_negated"], name="before"))
    graph.node.append(helper.make_node("Mul", ["o_once", "two"], ["o"], name="after"))
    return model


def as_layer(inputs: Arrays) -> Arrays:
    """The inputs that the op itself sees in :func:`layer_model`."""
    return inputs | {"q": -inputs["q"]}


def activations(inputs: Arrays) -> Arrays:
    """The graph inputs of :func:`layer_model`."""
    return {name: x for name, x in inputs.items() if name not in PARAMETERS}


def executed(running: ort.InferenceSession) -> Counter[tuple[str, str]]:
    """(operator, EP) of each node that ran, from the profile of a session made with ``enable_profiling``."""
    path = Path(running.end_profiling())
    events = json.loads(path.read_text())
    path.unlink()
    return Counter(
        (event["args"]["op_name"], event["args"].get("provider", ""))
        for event in events
        if event.get("cat") == "Node" and event["name"].endswith("_kernel_time")
    )


def two_calls(config: KdaConfig, inputs: Arrays, *, keep_first: bool) -> onnx.ModelProto:
    """The op twice on the same tokens, the second from the states that the first left: outputs as of one call.

    With ``keep_first`` the first call's states are also graph outputs (``first_conv``, ``first_state``, negated), so
    the second call must not overwrite them; without, ORT may hand it the same memory for both.
    """
    model = call_model(config, inputs)
    graph = model.graph
    first = next(node for node in graph.node if node.op_type == "KimiDeltaAttention")
    second = onnx.NodeProto()
    second.CopyFrom(first)
    second.name = "second"
    between = {"conv_state": "between_conv", "initial_state": "between_state"}
    second.input[:] = [between.get(name, name) for name in first.input]
    first.output[:] = ["o_first", *between.values()]
    graph.node.append(second)
    if keep_first:
        for name, kept in zip(between.values(), ("first_conv", "first_state"), strict=True):
            graph.node.append(helper.make_node("Neg", [name], [kept], name=f"keep_{kept}"))
            graph.output.append(helper.make_tensor_value_info(kept, onnx.TensorProto.FLOAT, None))
    return model
