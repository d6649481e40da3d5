"""The C++ CPU kernel against the float64 reference, driven through ctypes."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from pathlib import Path

import deltafuse
import ml_dtypes
import numpy as np
import pytest
from deltafuse.custom_ops.mla.draw import CASES, DTYPES, TABLE_ROWS, draw_inputs
from deltafuse.custom_ops.mla.quantize import FLOAT8
from deltafuse.custom_ops.mla.reference import errors, reference, relative_error, tolerance
from deltafuse.custom_ops.mla.spec import MlaConfig
from deltafuse.errors import DeltaFuseError
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from .configs import BARE, CONFIGS, FULL, STATIC
from .cpu_library import Arrays, CpuKernel, compile_library, empty_outputs, fill
from .strategies import Drawn, calls

LENGTHS = (1, 2, 5, 70)
BASELINE, AVX2, BEST = 1, 2, 0


def _built_library() -> Path | None:
    """The installed plugin's library, if it has the C face."""
    try:
        path = Path(deltafuse.get_library_path())
        ctypes.CDLL(str(path)).deltafuse_mla_cpu_forward  # noqa: B018
    except (DeltaFuseError, OSError, AttributeError):
        return None
    return path


@pytest.fixture(scope="session")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> CpuKernel:
    library = _built_library() or compile_library(tmp_path_factory.mktemp("mla"))
    if library is None:
        pytest.skip("no C++ compiler (c++, g++ or clang++) and no built library")
    return CpuKernel(library)


def assert_close(config: MlaConfig, inputs: Arrays, got: Arrays, allowed: float, what: object) -> None:
    found = errors(config, inputs, got)
    assert max(found.values()) <= allowed, f"{what}: {found}, allowed {allowed}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CONFIGS)
def test_every_case_and_length(kernel: CpuKernel, name: str, dtype: str) -> None:
    config = CONFIGS[name]
    for case in CASES:
        for tokens in LENGTHS if name != "heads-128" else (1, 9):
            inputs = draw_inputs(config, 3, tokens, 75, np.random.default_rng(tokens), case, dtype, cos_dtype=dtype)
            for in_place in (False, True) if config.static_cache else (False,):
                got = kernel.run(config, inputs, in_place=in_place)
                allowed = tolerance("cpu", dtype, case, config.cache_type)
                assert_close(config, inputs, got, allowed, (case, tokens, in_place))


@pytest.mark.parametrize("limit", [BASELINE, AVX2, BEST])
def test_every_instruction_set(kernel: CpuKernel, limit: int) -> None:
    kernel.instruction_set(limit)
    try:
        for name, config in CONFIGS.items():
            for tokens in (1, 41):
                for dtype in DTYPES:
                    inputs = draw_inputs(config, 2, tokens, 50, np.random.default_rng(3), dtype=dtype)
                    got = kernel.run(config, inputs)
                    assert_close(config, inputs, got, tolerance("cpu", dtype, cache_type=config.cache_type), name)
    finally:
        kernel.instruction_set(BEST)


@settings(
    max_examples=200, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(call=calls(), threads=st.integers(1, 3), in_place=st.booleans())
def test_anything(kernel: CpuKernel, call: Drawn, threads: int, in_place: bool) -> None:
    inputs = call.inputs()
    got = kernel.run(call.config, inputs, threads=threads, in_place=in_place)
    allowed = tolerance("cpu", call.dtype, call.case, call.config.cache_type)
    assert_close(call.config, inputs, got, allowed, call)


def test_long_caches_are_split(kernel: CpuKernel) -> None:
    """More keys than one task takes, ragged: and a row's bits depend on nothing beside it."""
    config = replace(STATIC, has_mask=False, num_heads=4)
    inputs = draw_inputs(config, 4, 2, 3000, np.random.default_rng(4), "full-cache")
    inputs["cache_lengths"][:3] = [0, 1023, 2990]
    got = kernel.run(config, inputs)
    assert_close(config, inputs, got, tolerance("cpu", "float32"), "split")
    for b in range(4):
        shared = ("kv_b_weight", "kv_norm_weight", "cos", "sin")
        one = {name: x if name in shared else x[b : b + 1] for name, x in inputs.items()}
        np.testing.assert_array_equal(kernel.run(config, one, threads=1)["o"][0], got["o"][b])
    paged = replace(config, paged=True)
    inputs = draw_inputs(paged, 2, 3, 2500, np.random.default_rng(4), block_size=64)
    assert_close(paged, inputs, kernel.run(paged, inputs), tolerance("cpu", "float32"), "paged")


def test_parts_of_very_long_caches_are_larger(kernel: CpuKernel) -> None:
    """A row is cut by its own length, into no more parts than there is room for; several tiles into fewer each."""
    config = replace(STATIC, has_mask=False, num_heads=4)
    for tokens in (1, 40):
        inputs = draw_inputs(config, 3, tokens, 9100, np.random.default_rng(16), "full-cache")
        inputs["cache_lengths"][:] = [9100 - tokens, 8193, 300]
        got = kernel.run(config, inputs, threads=3)
        assert_close(config, inputs, got, tolerance("cpu", "float32"), tokens)
        alone = {name: x[2:] if x.shape[0] == 3 else x for name, x in inputs.items()}
        for name in ("past_latent", "past_k_rope"):  # the same row in a smaller cache
            alone[name] = alone[name][:, : 300 + tokens]
        np.testing.assert_array_equal(kernel.run(config, alone, threads=1)["o"][0], got["o"][2])


@pytest.mark.parametrize("cache", ["latent", "expanded"])
def test_a_long_prompt_in_chunks(kernel: CpuKernel, cache: str) -> None:
    config = replace(CONFIGS["heads-128"], cache=cache, static_cache=True, num_heads=3)
    inputs = draw_inputs(config, 2, 700, 1500, np.random.default_rng(5))
    got = kernel.run(config, inputs, in_place=True)
    assert_close(config, inputs, got, tolerance("cpu", "float32"), cache)


@pytest.mark.parametrize("cache", ["latent", "expanded"])
def test_keys_beyond_one_chunk(kernel: CpuKernel, cache: str) -> None:
    """Batches so large that expanded keys and values are made a few at a time."""
    sizes, batch, tokens, past = ((256, 256, 400), 16, 720, 1400) if cache == "latent" else ((16, 16, 8), 200, 1770, 5)
    nope, wide, rank = sizes
    config = MlaConfig(1, nope, 0, wide, rank, nope**-0.5, cache=cache, has_past=True, has_present=True)
    inputs = draw_inputs(config, batch, tokens, past, np.random.default_rng(6))
    got = kernel.run(config, inputs)
    for b in (0, batch - 1):
        one = {name: x if name == "kv_b_weight" else x[b : b + 1] for name, x in inputs.items()}
        found = errors(config, one, {name: x[b : b + 1] for name, x in got.items()})
        assert max(found.values()) < tolerance("cpu", "float32"), found


def test_steps_continue_a_prompt(kernel: CpuKernel) -> None:
    """A prompt, then single tokens on the cache it left, updated in place."""
    config = replace(STATIC, has_mask=False)
    inputs = draw_inputs(config, 2, 40, 60, np.random.default_rng(7))
    whole = reference(config, inputs)
    streams = ("q", "latent", "k_rope", "position_ids", "q_scale", "gate")
    part = {name: x[:, :33] if name in streams else x for name, x in inputs.items()}
    got = kernel.run(config, part, in_place=True)
    for t in range(33, 40):
        part = {name: x[:, t : t + 1] if name in streams else x for name, x in inputs.items()}
        part |= {"past_latent": got["present_latent"], "past_k_rope": got["present_k_rope"]}
        part["cache_lengths"] = inputs["cache_lengths"] + np.int32(t)
        got = kernel.run(config, part, in_place=True)
        assert relative_error(got["o"], whole["o"][:, t : t + 1]) < tolerance("cpu", "float32")


def test_float8_codes_are_the_nearest(kernel: CpuKernel) -> None:
    """Every code and every middle between two, with a scale of one."""
    every = np.arange(256, dtype=np.uint8).view(FLOAT8).astype(np.float32)
    every = np.unique(every[np.isfinite(every)])
    values = np.concatenate([every, (every[1:] + every[:-1]) / 2, every * np.float32(1.001)])
    config = MlaConfig(1, 2, 0, 2, 128, 1.0, cache="latent", cache_type="float8", has_past=True, has_present=True)
    rows = np.full((-(-values.size // 127), 128), 448.0, np.float32)  # the largest one sets the scale to 1
    rows[:, 1:].flat[: values.size] = np.clip(values, -448, 448)
    inputs = draw_inputs(config, 1, len(rows), 0, np.random.default_rng(8))
    inputs["latent"] = rows[None]
    got = kernel.run(config, inputs)
    want = reference(config, inputs)
    np.testing.assert_array_equal(got["present_latent"].view(np.uint8), want["present_latent"].view(np.uint8))
    np.testing.assert_array_equal(got["present_latent_scale"], 1)


@pytest.mark.parametrize("limit", [BASELINE, AVX2, BEST])
def test_every_code_of_a_cache(kernel: CpuKernel, limit: int) -> None:
    """One key, and its latent as value: the code's own number, exactly."""
    kernel.instruction_set(limit)
    try:
        for cache_type, rank in (("float8", 256), ("int8", 250)):
            config = MlaConfig(1, 1, 0, rank, rank, 1.0, cache="latent", has_past=True, has_present=True, has_mask=True)
            config = replace(config, cache_type=cache_type)
            inputs = draw_inputs(config, 1, 1, 1, np.random.default_rng(17))
            codes = np.arange(256, dtype=np.uint8)[:rank]
            if cache_type == "float8":
                codes[[127, 255]] = 0  # those two are no numbers
            inputs["past_latent"] = codes.view(inputs["past_latent"].dtype).reshape(1, 1, rank)
            inputs["past_latent_scale"] = np.full_like(inputs["past_latent_scale"], 0.5)
            inputs["kv_b_weight"] = np.eye(rank, rank + 1, 1, np.float32)
            inputs["attn_mask"] = np.array([0, -np.inf], np.float32).reshape(1, 1, 1, 2)
            want = inputs["past_latent"].astype(np.float32).reshape(1, 1, rank) / 2
            np.testing.assert_array_equal(kernel.run(config, inputs)["o"], want)
    finally:
        kernel.instruction_set(BEST)


def test_nan_in_one_row_stays_there(kernel: CpuKernel) -> None:
    config = replace(FULL, has_mask=False)
    inputs = draw_inputs(config, 3, 4, 5, np.random.default_rng(9))
    want = reference(config, inputs)["o"]
    inputs["past_latent"][1, 2, 0] = np.nan
    got = kernel.run(config, inputs)["o"]
    assert np.isnan(got[1]).all()
    assert relative_error(got[[0, 2]], want[[0, 2]]) < tolerance("cpu", "float32")


@pytest.mark.parametrize("limit", [BASELINE, AVX2, BEST])
def test_nan_scores_are_not_hidden(kernel: CpuKernel, limit: int) -> None:
    """Of one key alone, whose value is a number, and of all keys of a query: in both forms of the attention."""
    kernel.instruction_set(limit)
    try:
        for name in ("expanded", "full", "no-cache"):
            config = replace(CONFIGS[name], has_mask=False, window=0)
            inputs = draw_inputs(config, 2, 4, 70, np.random.default_rng(9))
            want = kernel.run(config, inputs)["o"]
            if config.cache == "expanded":
                key = {n: a.copy() for n, a in inputs.items()}
                key["past_key"][1, :, 3, 0] = np.nan
                got = kernel.run(config, key)["o"]
                assert np.isnan(got[1]).all() and np.array_equal(got[0], want[0]), name
            query = {n: a.copy() for n, a in inputs.items()}
            query["q"][1, 2] = np.nan
            got = kernel.run(config, query)["o"]
            assert np.isnan(got[1, 2]).all(), name
            assert np.array_equal(np.delete(got[1], 2, 0), np.delete(want[1], 2, 0)), name
    finally:
        kernel.instruction_set(BEST)


def test_no_tokens_and_no_batch(kernel: CpuKernel) -> None:
    for batch, tokens in ((2, 0), (0, 3)):
        inputs = draw_inputs(FULL, batch, tokens, 6, np.random.default_rng(10))
        got = kernel.run(FULL, inputs)
        assert got["o"].shape == (batch, tokens, 18)
        if tokens == 0:
            np.testing.assert_array_equal(got["present_latent"], inputs["past_latent"])


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("full", {"position_ids": np.full((2, 3), TABLE_ROWS)}, r"position_ids\[0, 0\] is 300: cos and sin have 300"),
        ("full", {"position_ids": np.array([[0, 0, 0], [0, -1, 0]])}, r"position_ids\[1, 1\] is -1"),
        ("static", {"cache_lengths": np.array([0, 18], np.int32)}, r"cache_lengths\[1\] is 18, with 3 new tokens"),
        ("static", {"cache_lengths": np.array([-1, 0], np.int32)}, r"cache_lengths\[0\] is -1"),
        ("static", {"cache_lengths": np.array([2**62, 0])}, r"cache_lengths\[0\] is 4611"),
        ("expanded-static", {"cache_lengths": np.array([18, 0])}, r"the cache has room for 20"),
        ("paged", {"cache_lengths": np.array([0, 99], np.int32)}, r"the cache has room for 32"),
        ("paged", {"block_table": np.full((2, 2), 77, np.int32)}, r"block_table\[0, 0\] is 77: there are"),
        ("paged", {"block_table": np.full((2, 2), -1, np.int32)}, r"block_table\[0, 0\] is -1"),
    ],
)
def test_bad_values_write_nothing(kernel: CpuKernel, name: str, change: Arrays, reason: str) -> None:
    config = CONFIGS[name]
    inputs = draw_inputs(config, 2, 3, 20, np.random.default_rng(11))
    for in_place in (False, True):
        with pytest.raises(ValueError, match=reason):
            kernel.run(config, {**inputs, **change}, in_place=in_place)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"num_heads": 0}, "1 to 65536 expected"),
        ({"qk_rope_head_dim": -2}, "1 to 65536 expected"),
        ({"qk_rope_head_dim": 5}, "even qk_rope_head_dim, not 5"),
        ({"cos_width": 3}, "cos and sin have 3 columns: expected 4 or 2"),
        ({"dtype": 7}, "the kernel takes float32, float16 and bfloat16"),
        ({"rope": 4}, "unknown rope"),
        ({"scale": float("nan")}, "scale is not finite"),
        ({"batch": -1}, "negative size"),
        ({"window": -1}, "window -1"),
        ({"window": 2, "causal": 0}, "window 2"),
        ({"cache": 0}, "without a cache"),
        ({"block_size": 4}, "block_table needs cache_lengths"),
        ({"cache_type": 1, "packed_cache": 1}, "8-bit cache needs"),
        ({"cache": 2, "packed_cache": 1}, "packed cache needs"),
    ],
)
def test_refusals(kernel: CpuKernel, change: dict[str, float], reason: str) -> None:
    inputs = draw_inputs(FULL, 1, 3, 4, np.random.default_rng(12))
    params = fill(FULL, inputs, {})
    assert kernel.refusal(params) is None
    for name, value in change.items():
        setattr(params, name, value)
    assert reason in (kernel.refusal(params) or "")


@pytest.mark.parametrize(
    "name", ["q", "latent", "k_rope", "kv_b_weight", "cos", "gate", "past_latent", "past_k_rope", "o"]
)
def test_missing_operands(kernel: CpuKernel, name: str) -> None:
    inputs = draw_inputs(FULL, 1, 3, 4, np.random.default_rng(13))
    outputs = empty_outputs(FULL, inputs)
    params = fill(FULL, inputs, outputs)
    setattr(params, name, None)
    assert kernel.forward(params)


def test_a_growing_cache_cannot_be_in_place(kernel: CpuKernel) -> None:
    inputs = draw_inputs(FULL, 1, 3, 4, np.random.default_rng(14))
    outputs = empty_outputs(FULL, inputs)
    params = fill(FULL, inputs, outputs)
    params.present_latent = params.past_latent
    assert "needs another buffer" in (kernel.forward(params) or "")


def test_sixteen_bit_outputs_are_rounded_to_nearest_even(kernel: CpuKernel) -> None:
    """One key: o is its value, rounded to T."""
    for dtype in ("float16", "bfloat16"):
        kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
        config = replace(BARE, num_heads=1, kv_lora_rank=4, v_head_dim=64)
        inputs = draw_inputs(config, 1, 1, 0, np.random.default_rng(15), dtype=dtype)
        exact = inputs["latent"][0].astype(np.float32) @ inputs["kv_b_weight"].astype(np.float32)[:, 8:]
        got = kernel.run(config, inputs)["o"][0].astype(np.float32)
        assert np.mean(got == exact.astype(kind).astype(np.float32)) > 0.98
