"""LatentAttention through the plugin EP on a CUDA device. Needs a GPU, onnxruntime-gpu and PyTorch (device memory)."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("LatentAttention on the plugin EP: PyTorch is not installed", allow_module_level=True)
import torch

if not torch.cuda.is_available():
    pytest.skip("LatentAttention on the plugin EP: no GPU here", allow_module_level=True)
if importlib.util.find_spec("onnxruntime") is None:
    pytest.skip("LatentAttention on the plugin EP: onnxruntime is not installed", allow_module_level=True)
import deltafuse
import onnxruntime as ort
from deltafuse.custom_ops.mla.draw import TABLE_ROWS, draw_inputs
from deltafuse.custom_ops.mla.reference import errors, reference, relative_error, tolerance
from deltafuse.custom_ops.mla.spec import MlaConfig
from deltafuse.discovery import PluginError, cuda_status
from ep.call import quiet
from mla.configs import CONFIGS, STATIC
from mla.onnx_call import Arrays, call_model, run

from .test_ep_cuda import ORDERS, make

try:
    if why := cuda_status():
        pytest.skip(f"LatentAttention on the plugin EP: {why}", allow_module_level=True)
except PluginError as error:
    pytest.skip(f"LatentAttention on the plugin EP: {error}", allow_module_level=True)

STREAMS = ("q", "latent", "k_rope", "position_ids", "q_scale", "gate")


def session(config: MlaConfig, inputs: Arrays, order: str = "cuda first", **how: Any) -> ort.InferenceSession:
    made = make(call_model(config, inputs, **how).SerializeToString(), order, quiet())
    assert [node.name for node in deltafuse.assignment(made).fused] == ["mla"]
    return made


def assert_close(config: MlaConfig, inputs: Arrays, got: Arrays, allowed: float, what: object) -> None:
    found = errors(config, inputs, got)
    assert max(found.values()) <= allowed, f"{what}: {found}, allowed {allowed}"


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("name", CONFIGS)
def test_against_reference(name: str, dtype: str) -> None:
    config = CONFIGS[name]
    running = None
    for tokens, case in ((1, "normal"), (5, "huge-scores"), (40, "normal")):
        inputs = draw_inputs(config, 2, tokens, 75, np.random.default_rng(tokens), case, dtype)
        running = running or session(config, inputs, dtype=dtype)
        allowed = tolerance("cuda", dtype, case, config.cache_type)
        assert_close(config, inputs, run(running, config, inputs), allowed, (name, dtype, tokens, case))


@pytest.mark.parametrize("constant_weight", [False, True])
@pytest.mark.parametrize("order", ORDERS)
def test_weights_that_are_packed_and_that_are_not(order: str, constant_weight: bool) -> None:
    """A constant weight goes into the kernel when the session is made; ORT may free its own."""
    config = CONFIGS["heads-128"]
    inputs = draw_inputs(config, 2, 3, 200, np.random.default_rng(1), dtype="float16")
    running = session(config, inputs, order, dtype="float16", constant_weight=constant_weight)
    for tokens in (3, 1, 64):
        inputs = {
            **draw_inputs(config, 2, tokens, 200, np.random.default_rng(tokens), dtype="float16"),
            "kv_b_weight": inputs["kv_b_weight"],
        }
        got = run(running, config, inputs)
        assert_close(config, inputs, got, tolerance("cuda", "float16"), (order, constant_weight, tokens))


@pytest.mark.parametrize("name", ["static", "paged", "expanded-static"])
def test_one_buffer_for_past_and_present(name: str) -> None:
    config = replace(CONFIGS[name], has_mask=False, bool_mask=False)
    inputs = draw_inputs(config, 2, 8, 40, np.random.default_rng(2))
    whole = reference(config, inputs)
    running = session(config, inputs)
    caches = {name for name in inputs if name.startswith("past_")}
    tensors = {name: torch.from_numpy(np.ascontiguousarray(inputs[name])).cuda() for name in caches}
    for first, last in ((0, 5), (5, 6), (6, 8)):
        binding = running.io_binding()
        part = {name: x[:, first:last] if name in STREAMS else x for name, x in inputs.items()}
        part["cache_lengths"] = inputs["cache_lengths"] + np.int32(first)
        for name, x in part.items():
            if name not in caches:
                binding.bind_cpu_input(name, np.ascontiguousarray(x))
                continue
            where = ("cuda", 0, np.float32, tuple(x.shape), tensors[name].data_ptr())
            binding.bind_input(name, *where)
            binding.bind_output(name.replace("past", "present"), *where)
        binding.bind_output("o")
        running.run_with_iobinding(binding)
        o = binding.copy_outputs_to_cpu()[-1]
        assert relative_error(o, whole["o"][:, first:last]) < tolerance("cuda", "float32")
    for name in caches:
        got = {name.replace("past", "present"): tensors[name].cpu().numpy()}
        assert_close(config, inputs, got, tolerance("cuda", "float32"), name)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("full", {"position_ids": np.full((2, 3), TABLE_ROWS)}, "position_ids"),
        ("full", {"position_ids": np.full((2, 3), -1)}, "position_ids"),
        ("static", {"cache_lengths": np.array([0, 18], np.int32)}, "cache_lengths"),
        ("static", {"cache_lengths": np.array([-1, 0], np.int32)}, "cache_lengths"),
        ("paged", {"block_table": np.full((2, 2), 77, np.int32)}, "block_table"),
        ("full", {"attn_mask": np.zeros((2, 3, 3, 22), np.float32)}, "attn_mask has shape"),
    ],
)
def test_bad_values_fail_the_run(order: str, name: str, change: Arrays, reason: str) -> None:
    """The device finds them; the run says which node, and the session lives on."""
    config = CONFIGS[name]
    inputs = draw_inputs(config, 2, 3, 20, np.random.default_rng(3))
    running = session(config, inputs, order)
    run(running, config, inputs)
    with pytest.raises(Exception, match=f"LatentAttention node 'mla': .*{reason}"):
        run(running, config, {**inputs, **change})
    assert_close(config, inputs, run(running, config, inputs), tolerance("cuda", "float32"), name)


def test_a_fault_of_a_run_that_does_not_wait_is_told_by_the_next() -> None:
    inputs = draw_inputs(STATIC, 2, 3, 20, np.random.default_rng(4))
    running = session(STATIC, inputs)
    options = ort.RunOptions()
    options.add_run_config_entry("disable_synchronize_execution_providers", "1")
    bad = {**inputs, "cache_lengths": np.array([0, 18], np.int32)}
    binding = running.io_binding()
    for name, x in bad.items():
        binding.bind_cpu_input(name, np.ascontiguousarray(x))
    for name in STATIC.output_names():
        binding.bind_output(name, "cuda")
    running.run_with_iobinding(binding, options)
    torch.cuda.synchronize()
    with pytest.raises(Exception, match=r"an earlier run: LatentAttention node 'mla': .*cache_lengths"):
        run(running, STATIC, inputs)
    assert_close(STATIC, inputs, run(running, STATIC, inputs), tolerance("cuda", "float32"), "after it")
