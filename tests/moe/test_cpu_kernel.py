"""The C++ CPU kernel against the float64 reference, driven through ctypes."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from pathlib import Path
from typing import Any

import deltafuse
import numpy as np
import pytest
from deltafuse.custom_ops.moe.draw import CASES, DTYPES, draw_inputs
from deltafuse.custom_ops.moe.reference import reference, relative_error, tolerance
from deltafuse.custom_ops.moe.spec import BIASES, FORMATS, MATRICES, MoeConfig
from deltafuse.errors import DeltaFuseError
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from .configs import CONFIGS, FULL
from .cpu_library import Arrays, CpuKernel, compile_library, output_arrays, set_params

BASELINE, AVX2, BEST = 1, 2, 0


def _built_library() -> Path | None:
    """The installed plugin's library, if it has the C face."""
    try:
        path = Path(deltafuse.get_library_path())
        ctypes.CDLL(str(path)).deltafuse_moe_cpu_forward  # noqa: B018
    except (DeltaFuseError, OSError, AttributeError):
        return None
    return path


@pytest.fixture(scope="session")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> CpuKernel:
    library = _built_library() or compile_library(tmp_path_factory.mktemp("moe"))
    if library is None:
        pytest.skip("no C++ compiler (c++, g++ or clang++) and no built library")
    return CpuKernel(library)


def check(kernel: CpuKernel, config: MoeConfig, inputs: Arrays, dtype: str = "float32", what: object = "") -> Arrays:
    truth, result = reference(config, inputs), kernel.run(config, inputs, dtype)
    error = relative_error(result["y"], truth["y"])
    assert error <= tolerance("cpu", dtype), f"{what}: {error}"
    if config.has_ids:
        assert np.array_equal(result["expert_ids"], truth["expert_ids"]), what
        assert relative_error(result["expert_weights"], truth["expert_weights"]) < 1e-6, what
    return result


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CONFIGS)
def test_every_case(kernel: CpuKernel, name: str, dtype: str) -> None:
    config = CONFIGS[name]
    for number, case in enumerate(CASES):
        for tokens in ((2, 5), (1, 1), (1, 3)):
            inputs = draw_inputs(
                config,
                tokens,
                np.random.default_rng(number),
                case,
                dtype,
                scale_dtype=dtype if number % 2 else "float32",
                router_dtype="float32" if number % 3 else dtype,
            )
            check(kernel, config, inputs, dtype, (case, tokens))


@pytest.mark.parametrize("limit", [BASELINE, AVX2, BEST])
def test_every_instruction_set_selects_the_same(kernel: CpuKernel, limit: int) -> None:
    """And within the tolerance computes the same, for every format."""
    try:
        kernel.instruction_set(limit)
        for config in CONFIGS.values():
            for tokens in (1, 2, 9):
                check(kernel, config, draw_inputs(config, tokens, np.random.default_rng(tokens), "near-ties"))
    finally:
        kernel.instruction_set(BEST)


def test_threads_do_not_matter(kernel: CpuKernel) -> None:
    config = CONFIGS["int4-128"]
    for tokens in (1, 33):
        inputs = draw_inputs(config, tokens, np.random.default_rng(1))
        results = [kernel.run(config, inputs, threads=threads) for threads in (1, 2, 5)]
        for other in results[1:]:
            assert all(np.array_equal(results[0][name], other[name]) for name in other)


def test_more_tokens_than_a_chunk(kernel: CpuKernel) -> None:
    """The buffers are for 1024 tokens at once; a token's result does not depend on where it is cut."""
    config = CONFIGS["full"]
    inputs = draw_inputs(config, 2 * 1024 + 5, np.random.default_rng(2))
    whole = check(kernel, config, inputs)
    for start in (0, 1022, 2047):
        part = {**inputs, "x": inputs["x"][start : start + 4]}
        assert relative_error(kernel.run(config, part)["y"], whole["y"][start : start + 4]) < 1e-6


def test_no_tokens(kernel: CpuKernel) -> None:
    config = CONFIGS["full"]
    result = kernel.run(config, draw_inputs(config, (0, 3), np.random.default_rng(0)))
    assert result["y"].shape == (0, 3, config.hidden_size) and result["expert_ids"].shape == (0, config.top_k)


@pytest.mark.parametrize("logit", [np.nan, np.inf, -np.inf, -104.0, -88.5, 3e38])
@pytest.mark.parametrize("function", ["sigmoid", "softmax"])
def test_hostile_logits(kernel: CpuKernel, logit: float, function: str) -> None:
    config = MoeConfig(6, 2, 4, 2, score_function=function, has_router_weight=False, has_ids=True, n_group=2)
    inputs = draw_inputs(config, 3, np.random.default_rng(3))
    inputs["router_logits"][0, 3] = logit
    inputs["router_logits"][1, :] = logit
    check(kernel, config, inputs)


def test_every_byte_of_every_format(kernel: CpuKernel) -> None:
    """float8's NaN included: its rows give NaN and no others do."""
    for kind in FORMATS[1:6]:
        config = MoeConfig(1, 1, 512, 2, weight_format=kind, group_top=1, norm_topk_prob=0, activation="relu2", gated=0)
        inputs = draw_inputs(config, 1, np.random.default_rng(4))
        inputs["x"] = np.abs(inputs["x"])  # uint4 and uint8 rows would nearly cancel
        weights = inputs["gate_up_weight"]
        width = weights.shape[-1]
        weights[...] = np.resize(np.arange(256, dtype=np.uint8), (1, 2, width)).view(weights.dtype)
        if kind == "float8":
            weights[weights & 0x7F == 0x7F] = 0
        check(kernel, config, inputs, what=kind)
        if kind == "float8":
            weights[0, 1, 5] = 0x7F
            inputs["down_weight"][0, ::2, 1] = 0
            assert np.all(np.isnan(kernel.run(config, inputs)["y"]))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_geometry(kernel: CpuKernel, data: st.DataObject) -> None:
    draw = data.draw
    groups = draw(st.integers(1, 4))
    size = draw(st.integers(1, 5))
    kind, shared_kind = draw(st.sampled_from(FORMATS)), draw(st.sampled_from(FORMATS))
    even = 2 if "4" in kind + shared_kind else 1
    gated = draw(st.integers(0, 1))
    activation = draw(st.sampled_from(["silu", "gelu", "gelu_tanh", "relu2"]))

    def block(of: str) -> int:
        return 0 if of in ("float", "bfloat16") else even * draw(st.integers(0, 20))

    config = MoeConfig(
        groups * size,
        draw(st.integers(1, groups * size)),
        even * draw(st.integers(1, 70)),
        even * draw(st.integers(1, 40)),
        even * draw(st.integers(0, 40)),
        score_function=draw(st.sampled_from(["sigmoid", "softmax"])),
        n_group=groups,
        topk_group=draw(st.integers(1, groups)),
        group_top=draw(st.integers(1, size)),
        masked_score=draw(st.sampled_from(["-inf", "0"])),
        masked_weights=draw(st.integers(0, 1)),
        norm_topk_prob=draw(st.integers(0, 1)),
        norm_eps=draw(st.sampled_from([0.0, 1e-20, 1e-3])),
        activation=activation,
        gated=gated,
        clamp=draw(st.sampled_from(["none", "before", "after"])) if gated else "none",
        gate_limit=draw(st.sampled_from([0.5, float("inf")])),
        up_limit=draw(st.sampled_from([0.25, float("inf")])),
        block_size=block(kind),
        shared_block_size=block(shared_kind),
        block_rows=draw(st.integers(1, 9)) if kind == "float8" else 1,
        shared_block_rows=draw(st.integers(1, 9)) if shared_kind == "float8" else 1,
        weight_format=kind,
        shared_format=shared_kind,
        has_zero_point="int" in kind and draw(st.booleans()),
        shared_has_zero_point="int" in shared_kind and draw(st.booleans()),
        has_expert_bias=draw(st.booleans()),
        has_router_bias=draw(st.booleans()),
        has_shared_gate=draw(st.booleans()),
        zero_experts=draw(st.integers(0, groups * size - 1)),
        norm_min=draw(st.sampled_from([0.0, 0.3])),
        choose_by_logits=draw(st.integers(0, 1)),
        activation_alpha=draw(st.sampled_from([1.0, 1.702])) if activation == "silu" else 1.0,
        up_offset=draw(st.sampled_from([0.0, 1.0])) if gated else 0.0,
        **{f"has_{name}": draw(st.booleans()) for name in BIASES},
        has_ids=True,
    )
    assert config.check() is None
    tokens, case = draw(st.integers(0, 9)), draw(st.sampled_from(CASES))
    inputs = draw_inputs(config, tokens, np.random.default_rng(draw(st.integers(0, 99))), case)
    check(kernel, config, inputs, what=(config, tokens, case))


REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "experts": ({"num_experts": 0}, "num_experts 0"),
    "top-k": ({"top_k": 17}, "top_k 17 of num_experts 16"),
    "groups": ({"n_group": 3}, "n_group 3"),
    "group-top": ({"group_top": 9}, "group_top 9"),
    "shared": ({"shared_intermediate_size": -1}, "shared_intermediate_size -1"),
    "score": ({"score": 2}, "unknown score_function"),
    "dtype": ({"dtype": 3}, "element type 3"),
    "tokens": ({"num_tokens": -1}, "negative number of tokens"),
    "clamp": ({"gate_limit": -1.0}, "gate_limit -1"),
    "zero-experts": ({"zero_experts": 16}, "zero_experts 16 of num_experts 16"),
    "least-sum": ({"norm_min": -1.0}, "norm_min -1"),
    "slope": ({"activation": 1, "activation_alpha": 2.0}, "activation_alpha 2"),
    "offset": ({"up_offset": float("inf")}, "not finite"),
    "scale": ({"routed_scaling_factor": float("nan")}, "not finite"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_is_refused(kernel: CpuKernel, name: str) -> None:
    changes, reason = REFUSALS[name]
    inputs = draw_inputs(FULL, 1, np.random.default_rng(5))
    params = set_params(FULL, {**inputs, **output_arrays(FULL, inputs, "float32")}, "float32")
    for field, value in changes.items():
        setattr(params, field, value)
    assert reason in (kernel.refusal(params) or "")


def test_operands_that_are_missing(kernel: CpuKernel) -> None:
    config = CONFIGS["not-gated"]
    inputs = draw_inputs(config, 1, np.random.default_rng(6))
    arrays = {**inputs, **output_arrays(config, inputs, "float32")}
    for name in ("x", "y", "router_weight"):
        params = set_params(config, arrays, "float32")
        setattr(params, name, None)
        assert name in (kernel.forward(params) or "")
    for name in MATRICES:
        for field, word in (("data", "weight"), ("scale", "scale"), ("zero_point", "zero_point")):
            params = set_params(config, arrays, "float32")
            setattr(getattr(params, name), field, None)
            assert f"{name}_{word} is required" in (kernel.forward(params) or "")


def test_blocks_that_are_none(kernel: CpuKernel) -> None:
    inputs = draw_inputs(FULL, 1, np.random.default_rng(7))
    arrays = {**inputs, **output_arrays(FULL, inputs, "float32")}
    for field, value, reason in (
        ("format", 7, "unknown format 7"),
        ("block_size", -2, "block_size -2"),
        ("block_size", 3, "4-bit weights need even numbers"),
        ("block_rows", 0, "block_rows 0"),
    ):
        params = set_params(FULL, arrays, "float32")
        setattr(params.gate_up, field, value)
        assert reason in (kernel.refusal(params) or "")
    odd = set_params(FULL, arrays, "float32")
    odd.intermediate_size = 9
    assert "down_weight: rows of 9" in (kernel.refusal(odd) or "")


def test_configurations_are_refused_like_the_spec_refuses_them(kernel: CpuKernel) -> None:
    """What the kernel takes, the spec defines, and the other way round, for sizes and blocks."""
    for changes in (
        {"top_k": 17},
        {"n_group": 5},
        {"topk_group": 5},
        {"group_top": 5},
        {"block_size": 5},
        {"intermediate_size": 9},
        {"gate_limit": -1.0},
        {"zero_experts": 15},
        {"zero_experts": 16},
        {"zero_experts": -1},
        {"activation": "relu2", "activation_alpha": 1.5},
        {"gated": 0, "clamp": "none", "up_offset": 0.5},
        {},
        {"n_group": 1, "topk_group": 1, "group_top": 16},
    ):
        config = replace(FULL, **changes)  # type: ignore[arg-type]
        params = set_params(config, {"x": np.zeros((1, config.hidden_size), np.float32)}, "float32")
        assert (kernel.refusal(params) is None) == (config.check() is None), changes
