"""The C++ CPU kernel against the float64 reference, driven through ctypes."""

from __future__ import annotations

import ctypes
import warnings
from dataclasses import replace
from pathlib import Path

import deltafuse
import ml_dtypes
import numpy as np
import pytest
from deltafuse.custom_ops.kda.draw import CASES, draw_inputs
from deltafuse.custom_ops.kda.reference import reference, relative_error, tolerance
from deltafuse.custom_ops.kda.spec import KdaConfig
from deltafuse.errors import DeltaFuseError
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from .configs import CONFIGS, FULL
from .cpu_library import Arrays, CpuKernel, compile_library

LENGTHS = (1, 2, 15, 16, 17, 70)
BASELINE, AVX2, BEST = 1, 2, 0


def _built_library() -> Path | None:
    """The installed plugin's library, if it has the C face."""
    try:
        path = Path(deltafuse.get_library_path())
        ctypes.CDLL(str(path)).deltafuse_kda_cpu_forward  # noqa: B018
    except (DeltaFuseError, OSError, AttributeError):
        return None
    return path


@pytest.fixture(scope="session")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> CpuKernel:
    library = _built_library() or compile_library(tmp_path_factory.mktemp("kda"))
    if library is None:
        pytest.skip("no C++ compiler (c++, g++ or clang++) and no built library")
    return CpuKernel(library)


def assert_close(got: Arrays, want: Arrays, allowed: float, what: object) -> None:
    errors = {name: relative_error(got[name], want[name]) for name in got}
    assert max(errors.values()) <= allowed, f"{what}: {errors}, allowed {allowed}"


@pytest.mark.parametrize("dtypes", [("float32", "float32"), ("float16", "float32"), ("bfloat16", "bfloat16")])
@pytest.mark.parametrize("name", CONFIGS)
def test_every_case_and_length(kernel: CpuKernel, name: str, dtypes: tuple[str, str]) -> None:
    config = CONFIGS[name]
    for case in CASES:
        if case == "ragged" and not config.has_cu_seqlens:
            continue
        for tokens in LENGTHS:
            inputs = draw_inputs(config, 3, tokens, np.random.default_rng(tokens), case, *dtypes)
            want = reference(config, inputs)
            for in_place in (False, True):
                got = kernel.run(config, inputs, *dtypes, in_place=in_place)
                assert_close(got, want, tolerance("cpu", dtypes[0], case), (case, tokens, in_place))


@pytest.mark.parametrize("limit", [BASELINE, AVX2, BEST])
def test_every_instruction_set(kernel: CpuKernel, limit: int) -> None:
    kernel.instruction_set(limit)
    try:
        for name, config in CONFIGS.items():
            for tokens in (1, 41):
                for dtype in ("float32", "float16", "bfloat16"):
                    inputs = draw_inputs(config, 2, tokens, np.random.default_rng(3), dtype=dtype, state_dtype=dtype)
                    got = kernel.run(config, inputs, dtype, dtype)
                    assert_close(got, reference(config, inputs), tolerance("cpu", dtype), (name, tokens, dtype))
    finally:
        kernel.instruction_set(BEST)


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    heads=st.integers(1, 3),
    repeats=st.integers(1, 3),
    dims=st.tuples(st.integers(1, 40), st.integers(1, 70)),
    batch=st.integers(1, 4),
    tokens=st.integers(0, 50),
    conv=st.sampled_from([(0, 0), (1, 0), (1, 1), (2, 1), (4, 3), (4, 4), (8, 7)]),
    layout=st.sampled_from(["KV", "VK"]),
    gate=st.sampled_from(["none", "softplus", "sigmoid"]),
    norm=st.sampled_from(["none", "sum", "max"]),
    output_gate=st.sampled_from(["none", "sigmoid", "silu"]),
    flags=st.tuples(*[st.booleans()] * 6),
    dtypes=st.tuples(*[st.sampled_from(["float32", "float16", "bfloat16"])] * 2),
    case=st.sampled_from(CASES),
    threads=st.integers(1, 3),
    seed=st.integers(0, 1000),
)
def test_anything(
    kernel: CpuKernel,
    heads: int,
    repeats: int,
    dims: tuple[int, int],
    batch: int,
    tokens: int,
    conv: tuple[int, int],
    layout: str,
    gate: str,
    norm: str,
    output_gate: str,
    flags: tuple[bool, ...],
    dtypes: tuple[str, str],
    case: str,
    threads: int,
    seed: int,
) -> None:
    packed, bias, states, rms, ragged, in_place = flags
    config = KdaConfig(
        heads,
        heads * repeats,
        *dims,
        scale=dims[0] ** -0.5,
        qk_l2norm=norm,
        gate_activation=gate,
        beta_activation="sigmoid" if bias else "none",
        conv_activation="silu" if conv[0] and bias else "none",
        output_gate=output_gate,
        state_layout=layout,
        conv_width=conv[0],
        conv_state_width=conv[1],
        packed_qkv=packed,
        has_dt_bias=bias,
        has_conv_bias=bool(conv[0]) and bias,
        has_conv_state=states and conv[1] > 0,
        has_initial_state=states,
        has_norm=rms,
        has_cu_seqlens=ragged,
        has_present_conv_state=conv[1] > 0,
        has_final_state=True,
    )
    inputs = draw_inputs(config, batch, tokens, np.random.default_rng(seed), case, *dtypes, index_dtype="int32")
    got = kernel.run(config, inputs, *dtypes, threads=threads, in_place=in_place)
    allowed = max(tolerance("cpu", dtype, case) for dtype in dtypes)
    assert_close(got, reference(config, inputs), allowed, config)


def test_heads_cut_into_slices(kernel: CpuKernel) -> None:
    """One head and many columns: the norm runs after all slices. As many slices as this machine has threads."""
    config = replace(FULL, num_heads=1, num_v_heads=1, head_dim=16, head_v_dim=200, output_gate="silu")
    for tokens in (1, 80):
        inputs = draw_inputs(config, 1, tokens, np.random.default_rng(9))
        got = kernel.run(config, inputs, in_place=True)
        assert_close(got, reference(config, inputs), tolerance("cpu", "float32"), tokens)


def test_a_long_prompt(kernel: CpuKernel) -> None:
    config = replace(CONFIGS["head-128"], num_v_heads=2, state_layout="VK")
    for case in ("normal", "collinear-slow", "gate-unbounded", "gate-near-bound"):
        inputs = draw_inputs(config, 1, 1500, np.random.default_rng(10), case)
        got = kernel.run(config, inputs)
        assert_close(got, reference(config, inputs), tolerance("cpu", "float32", case), case)


def test_steps_continue_a_prompt(kernel: CpuKernel) -> None:
    """A prompt, then single tokens on the states it left, updated in place."""
    inputs = draw_inputs(FULL, 2, 40, np.random.default_rng(11))
    whole = reference(FULL, inputs)
    streams = ("q", "k", "v", "g", "beta", "gate")
    part = {name: x[:, :33] if name in streams else x for name, x in inputs.items()}
    got = kernel.run(FULL, part)
    for t in range(33, 40):
        part = {name: x[:, t : t + 1] if name in streams else x for name, x in inputs.items()}
        part.update(conv_state=got["present_conv_state"], initial_state=got["final_state"])
        got = kernel.run(FULL, part, in_place=True)
        assert relative_error(got["o"], whole["o"][:, t : t + 1]) < tolerance("cpu", "float32")
    assert_close({name: got[name] for name in ("present_conv_state", "final_state")}, whole, 2e-5, "states")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_sixteen_bit_rounding_is_to_nearest_even(kernel: CpuKernel, dtype: str) -> None:
    """With one key channel and nothing to learn, o is the state's float32 value rounded to T."""
    kind = np.dtype(np.float16 if dtype == "float16" else ml_dtypes.bfloat16)
    config = KdaConfig(1, 1, 1, 1 << 16, 1.0, has_initial_state=True, has_final_state=True)
    every = np.arange(1 << 16, dtype=np.uint16).view(kind).astype(np.float32)

    def usable(x: NDArray[np.float32]) -> NDArray[np.float32]:
        """Finite, and no subnormal float32, which the kernel may flush to zero."""
        return np.where(np.isfinite(x) & ((x == 0) | (np.abs(x) > 1e-37)), x, np.float32(1))

    every = usable(every)
    step, half = (0xFFFFE000, 0x1000) if dtype == "float16" else (0xFFFF0000, 0x8000)
    ties = usable(((every.view(np.uint32) & np.uint32(step)) | np.uint32(half)).view(np.float32))
    between = every * np.random.default_rng(12).uniform(0.9, 0.99, every.size).astype(np.float32)
    for values in (every, ties, usable(between)):
        inputs = {name: np.full((1, 1, 1), fill, kind) for name, fill in (("q", 1), ("k", 0), ("g", 0), ("beta", 0))}
        inputs["v"] = np.zeros((1, 1, 1 << 16), kind)
        inputs["initial_state"] = values.reshape(1, 1, 1, -1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # overflow to infinity is right
            want = values.astype(kind)
        got = kernel.run(config, inputs, dtype)
        np.testing.assert_array_equal(got["o"].ravel().astype(np.float32), want.astype(np.float32))
        np.testing.assert_array_equal(got["final_state"].ravel(), values)
    exact = every.astype(kind)
    state = dict(inputs, initial_state=exact.reshape(1, 1, 1, -1))
    kept = kernel.run(config, state, dtype, dtype)["final_state"]
    np.testing.assert_array_equal(kept.ravel().astype(np.float32), every)


def test_reset_by_infinite_decay_and_nan_stays_in_its_row(kernel: CpuKernel) -> None:
    config = KdaConfig(2, 2, 5, 4, 0.5, has_initial_state=True, has_final_state=True)
    inputs = draw_inputs(config, 2, 40, np.random.default_rng(13))
    inputs["g"][:, ::7] = -np.inf
    want = reference(config, inputs)
    assert_close(kernel.run(config, inputs), want, tolerance("cpu", "float32"), "reset")
    inputs["v"][1, 3, 0] = np.nan  # sequence 1, head 0, column 0
    got = kernel.run(config, inputs)
    assert np.isnan(got["final_state"][1, 0, :, 0]).all()
    np.testing.assert_array_equal(np.isnan(got["final_state"]).sum(), 5)
    assert relative_error(got["o"][0], want["o"][0]) < tolerance("cpu", "float32")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"num_v_heads": 3}, "num_v_heads 3 is not a multiple of num_heads 2"),
        ({"head_dim": 0}, "all must be 1 or more"),
        ({"conv_width": 9}, "conv_width 9: expected 1 to 8"),
        ({"conv_state_width": 2}, "conv_state has 2 columns: expected 3 or 4"),
        ({"conv_state_width": 0}, "without columns"),
        ({"dtype": 7}, "the kernel takes float32, float16 and bfloat16"),
        ({"output_gate": 5}, "unknown qk_l2norm, gate_activation or output_gate"),
        ({"scale": float("nan")}, "scale is not finite"),
        ({"lower_bound": 0.5}, "lower_bound 0.5"),
        ({"batch": -1}, "negative size"),
        ({"conv_width": 0}, "without a conv_weight"),
    ],
)
def test_refusals(kernel: CpuKernel, change: dict[str, float], reason: str) -> None:
    inputs = draw_inputs(FULL, 1, 3, np.random.default_rng(14))
    params = kernel.params(FULL, inputs, {}, "float32", "float32")
    assert kernel.refusal(params) is None
    for name, value in change.items():
        setattr(params, name, value)
    assert reason in (kernel.refusal(params) or "")


@pytest.mark.parametrize(
    ("bounds", "reason"),
    [
        ([0, 4, 3, 6], "never fall: sequence 1 starts at 4 and has -1 tokens"),
        ([1, 4, 6], "must start at 0"),
        ([0, 4, 7], "cu_seqlens end at 7, but there are 6 tokens"),
    ],
)
def test_bad_lengths_write_nothing(kernel: CpuKernel, bounds: list[int], reason: str) -> None:
    config = CONFIGS["ragged-bare"]
    inputs = draw_inputs(config, len(bounds) - 1, 6, np.random.default_rng(15))
    inputs["cu_seqlens"] = np.array(bounds)
    outputs = {"o": np.full((1, 6, 14), np.nan, np.float32)}
    got = kernel.forward(kernel.params(config, inputs, outputs, "float32", "float32"))
    assert reason in (got or "") and np.isnan(outputs["o"]).all()


def test_missing_operands_are_named(kernel: CpuKernel) -> None:
    inputs = draw_inputs(FULL, 1, 3, np.random.default_rng(16))
    outputs = {"o": np.zeros((1, 3, 20), np.float32)}
    for name, reason in (("A_log", "needs A_log"), ("conv_weight", "without conv_weight"), ("gate", "go together")):
        params = kernel.params(FULL, inputs, outputs, "float32", "float32")
        setattr(params, name, None)
        assert reason in (kernel.forward(params) or "")
