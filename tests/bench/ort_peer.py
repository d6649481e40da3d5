"""ONNX Runtime's own ops for the same computations, com.microsoft GatedDeltaNet and QMoE, as models of one node."""

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


def qmoe_model(tokens: int, weights: dict[str, Any], top_k: int, block_size: int, dtype: str) -> onnx.ModelProto:
    """One QMoE node with int4 SwiGLU experts, gate rows before up rows.

    Inputs: input [tokens, D]; router_probs [tokens, E], logarithms of weights, far below them where an expert is not
    chosen: the best ``top_k`` are chosen by them, and softmax gives their weights' shares. (The op's ``router_weights``
    are not looked at on a GPU, ONNX Runtime 1.31.1.)

    Args:
        weights: NumPy arrays gate_up_weight [E, 2I, D / 2] and down_weight [E, D, I / 2], uint8 with two int4 a byte as
            ``deltafuse::GroupedQMoE`` has them, and gate_up_scale, down_scale.
        dtype: element type of tokens and scales.
    """
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    known = {name for s in state.get_all_operator_schema() if s.name == "QMoE" for name in s.attributes}
    element = ELEMENT_TYPES[dtype]
    experts, hidden = weights["gate_up_weight"].shape[0], 2 * weights["gate_up_weight"].shape[2]
    initializers = []
    cast = helper.tensor_dtype_to_np_dtype(element)
    for name in ("gate_up", "down"):
        stored = weights[f"{name}_weight"] ^ 0x88  # QMoE counts from 8
        scale = weights[f"{name}_scale"].astype(cast)
        if name == "gate_up":  # and wants gate and up rows in turn
            stored, scale = (
                x.reshape(experts, 2, -1, x.shape[-1]).swapaxes(1, 2).reshape(x.shape) for x in (stored, scale)
            )
        parts = ((f"{name}_weight", TensorProto.UINT8, stored), (f"{name}_scale", element, scale))
        initializers += [helper.make_tensor(n, kind, x.shape, x.tobytes(), True) for n, kind, x in parts]
    wanted: dict[str, Any] = {
        "k": top_k,
        "activation_type": "swiglu",
        "swiglu_fusion": 1,
        "activation_alpha": 1.0,
        "activation_beta": 0.0,
        "normalize_routing_weights": 1,
        "expert_weight_bits": 4,
        "block_size": block_size,
        "weights_prepacked": 0,
    }
    names = ["input", "router_probs", "gate_up_weight", "gate_up_scale", "", "down_weight", "down_scale"]
    node = helper.make_node(
        "QMoE",
        names,
        ["output"],
        domain="com.microsoft",
        **{name: value for name, value in wanted.items() if name in known},
    )
    inputs = {"input": [tokens, hidden], "router_probs": [tokens, experts]}
    graph = helper.make_graph(
        [node],
        "qmoe",
        [helper.make_tensor_value_info(name, element, shape) for name, shape in inputs.items()],
        [helper.make_tensor_value_info("output", element, [tokens, hidden])],
        initializers,
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
