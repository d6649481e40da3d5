"""The float64 reference against independent formulas and against its own invariants."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from deltafuse.custom_ops.kda.draw import CASES, draw_inputs
from deltafuse.custom_ops.kda.reference import delta_rule, reference, relative_error

from .configs import FULL


def test_recurrence_equals_the_chunked_form() -> None:
    """One chunk of kda-math's closed form, in exact exponent differences."""
    rng = np.random.default_rng(1)
    tokens, key_dim, value_dim, scale = 12, 5, 3, 0.3
    q, k, g = (rng.standard_normal((tokens, key_dim)) for _ in range(3))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    g = -np.abs(g)
    v, beta = rng.standard_normal((tokens, value_dim)), rng.uniform(0, 1, tokens)
    start = rng.standard_normal((key_dim, value_dim))
    total = np.cumsum(g, axis=0)
    decay = np.exp(total[:, None] - total[None])
    lower = np.tril(np.ones((tokens, tokens)), -1)
    a = lower * beta[:, None] * np.einsum("ic,jc,ijc->ij", k, k, decay)
    m = (lower + np.eye(tokens)) * np.einsum("ic,jc,ijc->ij", q, k, decay)
    delta = np.linalg.solve(np.eye(tokens) + a, beta[:, None] * (v - (k * np.exp(total)) @ start))
    out = scale * ((q * np.exp(total)) @ start + m @ delta)
    end = np.exp(total[-1])[:, None] * start + (k * np.exp(total[-1] - total)).T @ delta

    got, state = delta_rule(scale, *(x[None, :, None] for x in (q, k, v, g)), beta[None, :, None], start[None, None])
    np.testing.assert_allclose(got[0, :, 0], out, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(state[0, 0], end, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("columns", [3, 4])
def test_steps_of_one_token_equal_one_run(columns: int) -> None:
    config = replace(FULL, conv_state_width=columns)
    inputs = draw_inputs(config, 2, 9, np.random.default_rng(2))
    whole = reference(config, inputs)
    step = dict(inputs)
    for t in range(9):
        for name in ("q", "k", "v", "g", "beta", "gate"):
            step[name] = inputs[name][:, t : t + 1]
        part = reference(config, step)
        assert relative_error(part["o"], whole["o"][:, t : t + 1]) < 1e-12
        step["conv_state"], step["initial_state"] = part["present_conv_state"], part["final_state"]
    assert relative_error(step["initial_state"], whole["final_state"]) < 1e-12
    np.testing.assert_array_equal(step["conv_state"], whole["present_conv_state"])


def test_ragged_sequences_equal_separate_runs() -> None:
    config = replace(FULL, has_cu_seqlens=True)
    inputs = draw_inputs(config, 5, 17, np.random.default_rng(3), "ragged")
    bounds = inputs["cu_seqlens"]
    assert 0 in np.diff(bounds) and 1 in np.diff(bounds)
    whole = reference(config, inputs)
    alone = replace(config, has_cu_seqlens=False)
    for n, (start, stop) in enumerate(pairwise(bounds)):
        one = {
            name: x[:, start:stop] if name in ("q", "k", "v", "g", "beta", "gate") else x for name, x in inputs.items()
        }
        one.update(conv_state=inputs["conv_state"][n : n + 1], initial_state=inputs["initial_state"][n : n + 1])
        part = reference(alone, one)
        assert relative_error(whole["o"][:, start:stop], part["o"]) < 1e-13
        for name in ("present_conv_state", "final_state"):
            np.testing.assert_array_equal(whole[name][n : n + 1], part[name])


def test_layouts_and_packing_change_nothing_else() -> None:
    inputs = draw_inputs(FULL, 2, 7, np.random.default_rng(4))
    plain = reference(FULL, inputs)
    packed = dict(inputs, q=np.concatenate([inputs[name] for name in "qkv"], axis=-1))
    packed["initial_state"] = inputs["initial_state"].swapaxes(-1, -2)
    other = reference(replace(FULL, packed_qkv=True, state_layout="VK"), packed)
    np.testing.assert_array_equal(other["o"], plain["o"])
    np.testing.assert_array_equal(other["final_state"], plain["final_state"].swapaxes(-1, -2))


def test_convolution_equals_numpy_convolve() -> None:
    inputs = draw_inputs(FULL, 1, 8, np.random.default_rng(5))
    config = replace(FULL, conv_activation="none", has_conv_bias=False)
    line = np.concatenate([inputs["conv_state"].transpose(0, 2, 1), np.concatenate([inputs[n] for n in "qkv"], -1)], 1)
    mixed = np.stack(
        [np.convolve(line[0, :, c], inputs["conv_weight"][c, 0, ::-1], "valid") for c in range(config.conv_channels)],
        -1,
    )
    names = np.split(mixed[None], [12, 24], axis=-1)
    bare = replace(config, conv_width=0, conv_state_width=0, has_conv_state=False, has_present_conv_state=False)
    direct = reference(bare, {**inputs, **dict(zip("qkv", names, strict=True))})
    assert relative_error(reference(config, inputs)["o"], direct["o"]) < 1e-6  # the state was drawn in float32


@pytest.mark.parametrize("kind", ["none", "sum", "max"])
def test_l2norm_variants_differ_on_tiny_keys(kind: str) -> None:
    config = replace(FULL, qk_l2norm="sum", conv_activation="none")
    inputs = draw_inputs(config, 1, 6, np.random.default_rng(6), "tiny-keys")
    base = reference(config, inputs)["o"]
    error = relative_error(reference(replace(config, qk_l2norm=kind), inputs)["o"], base)
    assert (error == 0) if kind == "sum" else error > 1e-2


@pytest.mark.parametrize("gate", ["none", "softplus", "sigmoid"])
@pytest.mark.parametrize("case", CASES)
def test_every_case_is_finite_and_as_asked(gate: str, case: str) -> None:
    config = replace(FULL, gate_activation=gate, has_cu_seqlens=case == "ragged")
    inputs = draw_inputs(config, 3, 20, np.random.default_rng(7), case)
    result = reference(config, inputs)
    assert all(np.all(np.isfinite(x)) for x in result.values())
    assert tuple(inputs) == config.input_names()


def test_bad_calls_are_refused() -> None:
    inputs = draw_inputs(FULL, 1, 3, np.random.default_rng(8))
    with pytest.raises(ValueError, match="missing inputs: beta"):
        reference(FULL, {name: x for name, x in inputs.items() if name != "beta"})
    with pytest.raises(ValueError, match="not a multiple"):
        reference(replace(FULL, num_v_heads=3), inputs)
    with pytest.raises(ValueError, match="prefix sums"):
        reference(replace(FULL, has_cu_seqlens=True), {**inputs, "cu_seqlens": np.array([0, 2])})
