"""LatentAttention through the plugin EP on the CPU device, against the float64 reference."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import deltafuse
import ml_dtypes
import numpy as np
import onnx
import onnxruntime as ort
import pytest
from deltafuse.custom_ops.mla.draw import CASES, TABLE_ROWS, draw_inputs
from deltafuse.custom_ops.mla.quantize import FLOAT8
from deltafuse.custom_ops.mla.reference import errors, reference, relative_error, tolerance
from deltafuse.custom_ops.mla.spec import MlaConfig
from mla.configs import CONFIGS, FULL, STATIC
from mla.onnx_call import Arrays, call_model, run
from onnxruntime.capi.onnxruntime_pybind11_state import InvalidArgument

from .call import quiet

pytestmark = pytest.mark.usefixtures("library")

STREAMS = ("q", "latent", "k_rope", "position_ids", "q_scale", "gate")


def plugin_session(
    config: MlaConfig, inputs: Arrays, *, options: ort.SessionOptions | None = None, **how: Any
) -> ort.InferenceSession:
    """A session whose call is sure to run on the plugin EP, on the CPU device."""
    model = call_model(config, inputs, **how)
    made: ort.InferenceSession = deltafuse.session(
        model.SerializeToString(), device="cpu", sess_options=options or quiet(), strict=True
    )
    return made


def assert_close(config: MlaConfig, inputs: Arrays, got: Arrays, allowed: float, what: object) -> None:
    found = errors(config, inputs, got)
    assert max(found.values()) <= allowed, f"{what}: {found}, allowed {allowed}"


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("name", CONFIGS)
def test_against_reference(name: str, dtype: str) -> None:
    config = CONFIGS[name]
    running = None
    for tokens, case in ((1, "normal"), (5, "huge-scores"), (70, "normal"), (9, "masked-rows"), (3, "full-cache")):
        inputs = draw_inputs(config, 3, tokens, 75, np.random.default_rng(tokens), case, dtype)
        running = running or plugin_session(config, inputs, dtype=dtype)
        allowed = tolerance("cpu", dtype, case, config.cache_type)
        assert_close(config, inputs, run(running, config, inputs), allowed, (name, dtype, tokens, case))


@pytest.mark.parametrize("case", CASES)
def test_every_case(case: str) -> None:
    for name in ("full", "static", "paged", "expanded-static", "float8-paged"):
        config = CONFIGS[name]
        inputs = draw_inputs(config, 2, 4, 30, np.random.default_rng(1), case, lengths_dtype="int64", shared=True)
        running = plugin_session(config, inputs, constant_weight=True)
        allowed = tolerance("cpu", "float32", case, config.cache_type)
        assert_close(config, inputs, run(running, config, inputs), allowed, (case, name))


@pytest.mark.parametrize("mask_dtype", ["float32", "bfloat16"])
def test_mask_and_angles_of_other_types(mask_dtype: str) -> None:
    config = CONFIGS["full"]
    inputs = draw_inputs(
        config, 2, 4, 6, np.random.default_rng(2), dtype="bfloat16", mask_dtype=mask_dtype, cos_dtype=mask_dtype
    )
    got = run(plugin_session(config, inputs, dtype="bfloat16"), config, inputs)
    assert_close(config, inputs, got, tolerance("cpu", "bfloat16"), mask_dtype)


def test_no_tokens_keeps_the_cache() -> None:
    inputs = draw_inputs(FULL, 2, 3, 6, np.random.default_rng(3))
    running = plugin_session(FULL, inputs)
    empty = {name: x[:, :0] if name in STREAMS else x for name, x in inputs.items()}
    empty["attn_mask"] = inputs["attn_mask"][:, :, :0, :6]
    got = run(running, FULL, empty)
    assert got["o"].shape == (2, 0, 18)
    np.testing.assert_array_equal(got["present_latent"], inputs["past_latent"])


def test_a_prompt_then_steps_in_one_buffer() -> None:
    """The static cache is one OrtValue, bound as past and as present."""
    config = replace(STATIC, has_mask=False)
    inputs = draw_inputs(config, 2, 12, 40, np.random.default_rng(4))
    whole = reference(config, inputs)
    running = plugin_session(config, inputs)
    caches = {name: ort.OrtValue.ortvalue_from_numpy(inputs[name].copy()) for name in ("past_latent", "past_k_rope")}
    there = inputs["cache_lengths"]
    for first, last in ((0, 7), (7, 8), (8, 9), (9, 12)):
        binding = running.io_binding()
        part = {name: x[:, first:last] if name in STREAMS else x for name, x in inputs.items()}
        part["cache_lengths"] = there + np.int32(first)
        for name, x in part.items():
            if name in caches:
                binding.bind_ortvalue_input(name, caches[name])
                binding.bind_ortvalue_output(name.replace("past", "present"), caches[name])
            else:
                binding.bind_cpu_input(name, np.ascontiguousarray(x))
        binding.bind_output("o")
        running.run_with_iobinding(binding)
        o = binding.get_outputs()[-1].numpy()  # in the order of binding
        assert relative_error(o, whole["o"][:, first:last]) < tolerance("cpu", "float32")
    for name, cache in caches.items():
        got = {"o": whole["o"], name.replace("past", "present"): cache.numpy()}
        assert_close(config, inputs, got, tolerance("cpu", "float32"), name)


def test_states_of_a_loop_share_memory() -> None:
    """Two layers in a row on one static cache: ORT may reuse the past's memory where shapes are known to be equal."""
    config = replace(STATIC, has_mask=False)
    inputs = draw_inputs(config, 1, 2, 20, np.random.default_rng(5))
    model = call_model(config, inputs, dynamic=False)
    again = onnx.NodeProto()
    again.CopyFrom(model.graph.node[0])
    again.name = "second"
    for index, name in ((9, "present_latent"), (10, "present_k_rope"), (14, "later_lengths")):
        again.input[index] = name
    again.output[:] = ["o_2", "present_latent_2", "present_k_rope_2"]
    two = onnx.helper.make_tensor("two", onnx.TensorProto.INT32, [1], [2])
    model.graph.initializer.append(two)
    model.graph.node.append(onnx.helper.make_node("Add", ["cache_lengths", "two"], ["later_lengths"]))
    model.graph.node.append(again)
    kinds = {"o_2": (1, 2, 18), "present_latent_2": (1, 20, 10), "present_k_rope_2": (1, 20, 4)}
    del model.graph.output[1:]
    for name, shape in kinds.items():
        model.graph.output.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape))
    inputs["cache_lengths"][:] = 5
    running = deltafuse.session(model.SerializeToString(), device="cpu", sess_options=quiet(), strict=True)
    got = dict(zip([out.name for out in running.get_outputs()], running.run(None, inputs), strict=True))
    first = reference(
        config,
        {
            **inputs,
            "past_latent": np.nan_to_num(inputs["past_latent"]),
            "past_k_rope": np.nan_to_num(inputs["past_k_rope"]),
        },
    )
    later = {**inputs, "past_latent": first["present_latent"], "past_k_rope": first["present_k_rope"]}
    second = reference(config, {**later, "cache_lengths": inputs["cache_lengths"] + 2})
    assert relative_error(got["o"], first["o"]) < 2e-5
    assert relative_error(got["o_2"], second["o"]) < 2e-5


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("full", {"position_ids": np.full((2, 3), TABLE_ROWS)}, "position_ids.0, 0. is 300"),
        ("full", {"position_ids": np.full((2, 3), -1)}, "position_ids.0, 0. is -1"),
        ("static", {"cache_lengths": np.array([0, 18], np.int32)}, "cache_lengths.1. is 18, with 3 new tokens"),
        ("static", {"cache_lengths": np.array([-1, 0], np.int32)}, "cache_lengths.0. is -1"),
        ("paged", {"cache_lengths": np.array([0, 99], np.int32)}, "the cache has room for 32"),
        ("paged", {"block_table": np.full((2, 2), 77, np.int32)}, "block_table.0, 0. is 77"),
        ("full", {"attn_mask": np.zeros((2, 3, 3, 22), np.float32)}, r"attn_mask has shape \[2, 3, 3, 22\]"),
        ("full", {"attn_mask": np.zeros((2, 3, 2, 23), np.float32)}, r"attn_mask has shape \[2, 3, 2, 23\]"),
        ("full", {"position_ids": np.zeros((2, 4), np.int64)}, r"position_ids has shape \[2, 4\]"),
        ("static", {"past_k_rope": np.zeros((2, 19, 4), np.float32)}, r"past_k_rope has shape \[2, 19, 4\]"),
        ("full", {"q_scale": np.zeros((3, 3), np.float32)}, r"q_scale has shape \[3, 3\]"),
    ],
)
def test_bad_values_name_the_node_and_the_value(name: str, change: Arrays, reason: str) -> None:
    config = CONFIGS[name]
    inputs = draw_inputs(config, 2, 3, 20, np.random.default_rng(6))
    axes = {axis: f"d{axis}" for axis in range(4)}
    model = call_model(config, inputs)
    for value in model.graph.input:  # every size is free: what does not fit is seen when it runs
        if value.name in change:
            for axis, dim in enumerate(value.type.tensor_type.shape.dim):
                dim.dim_param = f"{value.name}_{axes[axis]}"
    running = deltafuse.session(model.SerializeToString(), device="cpu", sess_options=quiet(), strict=True)
    want = run(running, config, inputs)
    with pytest.raises(InvalidArgument, match=f"LatentAttention node 'mla': .*{reason}"):
        run(running, config, {**inputs, **change})
    got = run(running, config, inputs)  # the session lives on
    np.testing.assert_array_equal(got["o"], want["o"])


def refusal(model: onnx.ModelProto) -> str:
    """Why the plugin does not take the model's call."""
    running = deltafuse.session(model.SerializeToString(), device="cpu", sess_options=quiet())
    refused = deltafuse.assignment(running).refused
    assert len(refused) == 1
    return refused[0].reason


@pytest.mark.parametrize(
    ("attribute", "value", "reason"),
    [
        ("num_heads", 0, "num_heads 0: expected 1 to 65536"),
        ("scale", float("nan"), "scale is not finite"),
        ("rope", "spiral", "rope 'spiral': expected one of none, half, interleaved, deinterleaved"),
        ("window", -1, "window -1: 0 for none"),
        ("causal", 2, "causal 2: expected 0 or 1"),
        ("gate_activation", "tanh", "gate_activation 'tanh': expected one of none, sigmoid"),
        ("cache", "none", "past_latent with cache 'none'"),
        ("cache_type", "int8", "past_latent_scale is missing for cache_type 'int8'"),
        ("kv_lora_rank", 11, r"latent has shape [B, S, 10]"),
        ("flavour", 1, "attribute flavour is not one that this version of deltafuse knows"),
    ],
)
def test_refused_nodes_run_their_body(attribute: str, value: Any, reason: str) -> None:
    inputs = draw_inputs(FULL, 2, 3, 4, np.random.default_rng(7))
    model = call_model(FULL, inputs)
    node = next(node for node in model.graph.node if node.op_type == "LatentAttention")
    kept = [entry for entry in node.attribute if entry.name != attribute]
    del node.attribute[:]
    node.attribute.extend([*kept, onnx.helper.make_attribute(attribute, value)])
    if attribute == "flavour":
        model.functions[0].attribute.append("flavour")
    found = refusal(model)
    assert reason.split("[")[0] in found, found
    assert "no op of ONNX Runtime takes a cache of latents" in found
    running = deltafuse.session(model.SerializeToString(), device="cpu", sess_options=quiet())
    got = dict(zip(FULL.output_names(), running.run(list(FULL.output_names()), inputs), strict=True))
    assert_close(FULL, inputs, got, tolerance("body", "float32"), attribute)


def test_other_versions_are_refused() -> None:
    inputs = draw_inputs(FULL, 1, 2, 3, np.random.default_rng(8))
    model = call_model(FULL, inputs)
    for entry in model.opset_import:
        if entry.domain == "deltafuse":
            entry.version = 2
    assert "the model has deltafuse::LatentAttention version 2" in refusal(model)


def test_the_profile_names_the_kernel(tmp_path: Path) -> None:
    inputs = draw_inputs(FULL, 2, 3, 4, np.random.default_rng(9))
    options = quiet()
    options.enable_profiling = True
    options.profile_file_prefix = str(tmp_path / "profile")
    running = plugin_session(FULL, inputs, options=options)
    run(running, FULL, inputs)
    text = Path(running.end_profiling()).read_text(encoding="utf-8")
    assert "deltafuse_mla_prefill" in text and "LatentAttention" in text


def test_eight_bit_types_go_through() -> None:
    """Codes come back as they went in."""
    config = CONFIGS["float8-static"]
    inputs = draw_inputs(config, 2, 3, 20, np.random.default_rng(10), dtype="bfloat16")
    assert inputs["past_latent"].dtype == FLOAT8 and inputs["q"].dtype == ml_dtypes.bfloat16
    got = run(plugin_session(config, inputs, dtype="bfloat16"), config, inputs)
    assert_close(config, inputs, got, tolerance("cpu", "bfloat16", cache_type="float8"), "float8")


def test_runs_at_once() -> None:
    """Threads share a session: each run has a workspace of its own."""
    for name in ("full", "float8-paged", "fresh-expanded"):
        config = CONFIGS[name]
        drawn = [draw_inputs(config, 2, tokens, 30, np.random.default_rng(tokens)) for tokens in (1, 5, 9, 20)]
        running = plugin_session(config, drawn[0])
        want = [run(running, config, inputs)["o"] for inputs in drawn]

        def often(number: int, running: Any = running, config: Any = config, drawn: Any = drawn) -> Any:
            return [run(running, config, drawn[number])["o"] for _ in range(5)]

        with ThreadPoolExecutor(4) as threads:
            for expected, results in zip(want, threads.map(often, range(4)), strict=True):
                for got in results:
                    np.testing.assert_array_equal(got, expected)
