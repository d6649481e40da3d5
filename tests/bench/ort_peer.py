"""ONNX Runtime's own op for the same computation, com.microsoft GatedDeltaNet, as a model of one node."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx
from onnx import TensorProto, helper

ELEMENT_TYPES = {"bfloat16": TensorProto.BFLOAT16, "float16": TensorProto.FLOAT16, "float32": TensorProto.FLOAT}


def has_gate() -> bool:
    """Does this ONNX Runtime's GatedDeltaNet know the bounded gate? In 1.31 the decay is made before it."""
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    schemas = [s for s in state.get_all_operator_schema() if s.name == "GatedDeltaNet"]
    return any("gate_lower_bound" in s.attributes for s in schemas)


def gated_delta_net_model(
    tokens: int, sequences: int, heads: int, width: int, scale: float, lower_bound: float, dtype: str, ragged: bool
) -> onnx.ModelProto:
    """One GatedDeltaNet node with decay per key channel, L2 norm, beta's sigmoid, and the gate if it has one.

    Inputs: query, key, value, decay [tokens, heads, width] and beta [tokens, heads] of ``dtype``; initial_state
    [sequences, heads, width, width] (V first), a_log, dt_bias, and cu_seqlens (int32) if ``ragged``. Without the gate
    (:func:`has_gate`) decay and beta are float32, and there is no a_log and no dt_bias.
    """
    gate = has_gate()
    element, f32 = ELEMENT_TYPES[dtype], TensorProto.FLOAT
    rows = [tokens, heads, width]
    state = [sequences, heads, width, width]
    soft = element if gate else f32
    inputs = dict.fromkeys(("query", "key", "value"), (element, rows))
    inputs |= {"decay": (soft, rows), "beta": (soft, rows[:2]), "initial_state": (f32, state)}
    if gate:
        inputs |= {"a_log": (f32, [heads]), "dt_bias": (f32, [heads * width])}
    if ragged:
        inputs["cu_seqlens"] = (TensorProto.INT32, [sequences + 1])
    node = helper.make_node(
        "GatedDeltaNet",
        ["query", "key", "value", "cu_seqlens" if ragged else "", "decay", "beta", "initial_state"]
        + (["a_log", "dt_bias"] if gate else []),
        ["output", "final_state"],
        domain="com.microsoft",
        beta_activation="sigmoid",
        qk_l2_norm=1,
        scale=scale,
        **({"gate_activation": "sigmoid", "gate_lower_bound": lower_bound} if gate else {}),
    )
    graph = helper.make_graph(
        [node],
        "gated_delta_net",
        [helper.make_tensor_value_info(name, kind, shape) for name, (kind, shape) in inputs.items()],
        [
            helper.make_tensor_value_info("output", element, rows),
            helper.make_tensor_value_info("final_state", f32, state),
        ],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def bind(model: onnx.ModelProto, tensors: dict[str, Any], outputs: dict[str, Any]) -> Callable[[], None]:
    """A session on the CUDA EP with all operands bound where they lie on the device; returns what runs it once.

    ``tensors`` and ``outputs`` hold PyTorch tensors by the model's names. Each call is ordered with PyTorch's current
    stream as if it ran there, and returns without waiting for the device.

    Raises:
        ImportError: no onnxruntime. RuntimeError: it has no CUDA EP, or not this op.
    """
    import onnxruntime
    import torch

    if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        raise RuntimeError("this onnxruntime has no CUDA execution provider")
    # A stream of its own: the default stream's handle is 0, which ORT takes for "none given", and then runs elsewhere.
    own = torch.cuda.Stream()
    provider = ("CUDAExecutionProvider", {"user_compute_stream": str(own.cuda_stream)})
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=[provider])
    session.disable_fallback()
    binding = session.io_binding()
    types = {value.name: value.type.tensor_type.elem_type for value in [*model.graph.input, *model.graph.output]}
    for name, x in tensors.items():
        binding.bind_input(name, "cuda", 0, types[name], list(x.shape), x.data_ptr())
    for name, x in outputs.items():
        binding.bind_output(name, "cuda", 0, types[name], list(x.shape), x.data_ptr())
    run_options = onnxruntime.RunOptions()
    run_options.add_run_config_entry("disable_synchronize_execution_providers", "1")

    def run() -> None:
        current = torch.cuda.current_stream()
        own.wait_stream(current)
        session.run_with_iobinding(binding, run_options)
        current.wait_stream(own)

    return run
