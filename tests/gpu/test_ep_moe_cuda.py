"""GroupedQMoE through the plugin EP on a CUDA device. Needs a GPU, onnxruntime-gpu and PyTorch (device memory)."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("GroupedQMoE on the plugin EP: PyTorch is not installed", allow_module_level=True)
import torch

if not torch.cuda.is_available():
    pytest.skip("GroupedQMoE on the plugin EP: no GPU here", allow_module_level=True)
if importlib.util.find_spec("onnxruntime") is None:
    pytest.skip("GroupedQMoE on the plugin EP: onnxruntime is not installed", allow_module_level=True)
import deltafuse
import onnxruntime as ort
from deltafuse.custom_ops.moe.draw import draw_inputs
from deltafuse.custom_ops.moe.reference import reference, relative_error, tolerance
from deltafuse.custom_ops.moe.spec import MoeConfig, cuda_refusal
from deltafuse.discovery import PluginError, cuda_status
from ep.call import quiet
from moe.configs import CONFIGS, FULL
from moe.onnx_call import Arrays, call_model, run

from .test_ep_cuda import ORDERS, make

try:
    if why := cuda_status():
        pytest.skip(f"GroupedQMoE on the plugin EP: {why}", allow_module_level=True)
except PluginError as error:
    pytest.skip(f"GroupedQMoE on the plugin EP: {error}", allow_module_level=True)


def session(
    model: onnx.ModelProto, order: str = "cuda first", options: ort.SessionOptions | None = None
) -> ort.InferenceSession:
    made = make(model.SerializeToString(), order, options or quiet())
    assert [node.name for node in deltafuse.assignment(made).fused] == ["moe"], deltafuse.assignment(made)
    return made


def check(config: MoeConfig, inputs: Arrays, got: Arrays, dtype: str, what: Any) -> None:
    truth = reference(config, inputs)
    if config.has_ids:
        assert np.array_equal(got["expert_ids"], truth["expert_ids"]), what
    kind = "float8_activations" if "float8" in (config.weight_format, config.shared_format) else dtype
    assert relative_error(got["y"], truth["y"]) <= tolerance("cuda", kind), what


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("name", [name for name, config in CONFIGS.items() if cuda_refusal(config) is None])
def test_against_reference(name: str, dtype: str) -> None:
    config, running = CONFIGS[name], None
    how: dict[str, Any] = {"dtype": dtype, "router_dtype": dtype}
    weights = draw_inputs(config, 1, np.random.default_rng(0), **how)
    for lead in ((1, 1), (2, 3), (1, 70), (0, 2)):
        fresh = draw_inputs(config, lead, np.random.default_rng(lead[1]), **how)
        inputs = {n: fresh[n] if n in ("x", "router_logits") else x for n, x in weights.items()}
        running = running or session(call_model(config, inputs, dtype=dtype))
        check(config, inputs, run(running, config, inputs), dtype, (name, dtype, lead))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("prepacking", [True, False])
def test_weights_that_are_packed_at_creation_and_in_the_first_run(order: str, prepacking: bool) -> None:
    config = CONFIGS["int4-128"]
    inputs = draw_inputs(config, 3, np.random.default_rng(1), dtype="float16")
    options = quiet()
    if not prepacking:
        options.add_session_config_entry("session.disable_prepacking", "1")
    running = session(call_model(config, inputs, dtype="float16"), order, options)
    for tokens in (3, 1, 100):
        part = {**inputs, "x": draw_inputs(config, tokens, np.random.default_rng(tokens), dtype="float16")["x"]}
        check(config, part, run(running, config, part), "float16", (order, prepacking, tokens))


def test_weights_that_are_no_constants_are_refused() -> None:
    inputs = draw_inputs(FULL, 3, np.random.default_rng(2))
    model = call_model(FULL, inputs)
    weight = next(t for t in model.graph.initializer if t.name == "down_weight")
    model.graph.input.append(onnx.helper.make_tensor_value_info(weight.name, weight.data_type, weight.dims))
    model.graph.initializer.remove(weight)
    made = deltafuse.session(model.SerializeToString(), "cuda", sess_options=quiet())
    (refusal,) = deltafuse.assignment(made).refused
    assert "down_weight is not a constant" in refusal.reason


def test_ort_gives_back_the_weights_that_are_packed() -> None:
    """Beside the packed weights there are no others on the device when the session stands.

    Needs a GPU that nothing else uses meanwhile. What a session takes whatever its weights are, a small one tells.
    """

    def taken(config: MoeConfig) -> tuple[int, int, ort.InferenceSession]:
        inputs = draw_inputs(config, 1, np.random.default_rng(3), dtype="float16")
        model = call_model(config, inputs, dtype="float16")
        torch.cuda.synchronize()
        before = torch.cuda.mem_get_info()[0]
        made = deltafuse.session(model.SerializeToString(), "cuda", sess_options=quiet(), strict=True)
        run(made, config, inputs)
        torch.cuda.synchronize()
        used = before - torch.cuda.mem_get_info()[0]
        return used, sum(x.nbytes for n, x in inputs.items() if n.startswith(("gate_up", "down"))), made

    large = replace(CONFIGS["int4-128"], num_experts=64, hidden_size=2048, intermediate_size=1024)
    sessions = [taken(config) for config in (CONFIGS["int4-128"], CONFIGS["int4-128"], large)]
    (_, _, _), (always, _, _), (used, size, _) = sessions
    assert size > 150 << 20
    assert used - always < 1.3 * size, f"{used >> 20} MiB, {always >> 20} MiB always, for {size >> 20} MiB of weights"


def test_sessions_share_what_they_pack_from_the_same_bytes() -> None:
    """A second session of the same weights takes no memory for them; of others, or without sharing, it does.

    Needs a GPU that nothing else uses meanwhile, as the test before does.
    """
    config = replace(CONFIGS["int4-128"], num_experts=64, hidden_size=2048, intermediate_size=1024)
    inputs = draw_inputs(config, 2, np.random.default_rng(3), dtype="float16")
    other = {name: x ^ 0x11 if name == "down_weight" else x for name, x in inputs.items()}
    size = sum(x.nbytes for name, x in inputs.items() if name.startswith(("gate_up", "down")))

    def made(weights: Arrays, **options: str) -> tuple[ort.InferenceSession, int]:
        torch.cuda.synchronize()
        before = torch.cuda.mem_get_info()[0]
        entries = quiet()
        # as deltafuse.session has it: the arena would keep the memory of the weights as they come
        entries.add_session_config_entry("session.use_device_allocator_for_initializers", "1")
        for name, value in options.items():
            entries.add_session_config_entry(f"ep.deltafuseexecutionprovider.{name}", value)
        running = session(call_model(config, weights, dtype="float16"), options=entries)
        check(config, weights, run(running, config, weights), "float16", options)
        torch.cuda.synchronize()
        return running, before - torch.cuda.mem_get_info()[0]

    first, _ = made(inputs)
    second, of_second = made(inputs)
    third, of_third = made(other)
    fourth, of_fourth = made(inputs, share_weights="0")
    # Each session takes some memory whatever its weights are, 150 MiB with the CUDA EP of ONNX Runtime 1.31.
    saved = min(of_third, of_fourth) - of_second
    assert saved > 0.7 * size, f"{saved >> 20} MiB saved of {size >> 20} MiB of weights"
    del first  # the others live on
    for running, weights in ((second, inputs), (third, other), (fourth, inputs)):
        check(config, weights, run(running, config, weights), "float16", "after the first is gone")


@pytest.mark.parametrize("case", ["bias-nan", "bias-inf", "bias-all-nan", "ties", "huge-logits", "zero-scales"])
def test_hostile_operands(case: str) -> None:
    for tokens in (1, 40):
        inputs = draw_inputs(FULL, tokens, np.random.default_rng(4), case, dtype="float16")
        running = session(call_model(FULL, inputs, dtype="float16"))
        check(FULL, inputs, run(running, FULL, inputs), "float16", (case, tokens))
