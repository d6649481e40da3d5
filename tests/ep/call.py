"""Sessions on the plugin EP for a model with one call of the op."""

from __future__ import annotations

from typing import Any

import deltafuse
import numpy as np
import onnx
import onnxruntime as ort
from deltafuse.custom_ops.kda.draw import draw_inputs
from deltafuse.custom_ops.kda.spec import KdaConfig
from kda import onnx_call
from kda.onnx_call import Arrays, run

__all__ = ["SMALL", "Arrays", "call_model", "draw", "plugin_session", "quiet", "run"]

#: Small, with everything that can be there.
SMALL = KdaConfig(
    num_heads=2,
    num_v_heads=4,
    head_dim=8,
    head_v_dim=4,
    scale=0.4,
    qk_l2norm="sum",
    gate_activation="sigmoid",
    beta_activation="sigmoid",
    conv_activation="silu",
    output_gate="sigmoid",
    conv_width=4,
    conv_state_width=3,
    has_dt_bias=True,
    has_conv_state=True,
    has_initial_state=True,
    has_norm=True,
    has_present_conv_state=True,
    has_final_state=True,
)


def quiet() -> ort.SessionOptions:
    """Session options that keep warnings and errors out of the tests' output."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    return options


def draw(config: KdaConfig, batch: int, tokens: int, seed: int = 0, **how: Any) -> Arrays:
    return draw_inputs(config, batch, tokens, np.random.default_rng(seed), **how)


def call_model(config: KdaConfig, inputs: Arrays, **types: Any) -> onnx.ModelProto:
    """:func:`kda.onnx_call.call_model` without casts where the call is float32: its results are the graph's outputs."""
    model = onnx_call.call_model(config, inputs, **types)
    if types.get("dtype", "float32") == types.get("state_dtype", "float32") == "float32":
        results = {node.input[0]: node.output[0] for node in model.graph.node if node.op_type == "Cast"}
        kept = [node for node in model.graph.node if node.op_type != "Cast"]
        for node in kept:
            node.output[:] = [results.get(name, name) for name in node.output]
        del model.graph.node[:]
        model.graph.node.extend(kept)
    return model


def plugin_session(config: KdaConfig, inputs: Arrays, **types: Any) -> ort.InferenceSession:
    """A session whose call of the op is sure to run on the plugin EP, on the CPU device."""
    model = call_model(config, inputs, **types)
    made: ort.InferenceSession = deltafuse.session(
        model.SerializeToString(), device="cpu", sess_options=quiet(), strict=True
    )
    return made
