"""The float64 reference against a naive loop over tokens, and against its own invariants."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from deltafuse.custom_ops.mla.draw import CASES, TABLE_ROWS, draw_inputs
from deltafuse.custom_ops.mla.quantize import (
    FLOAT8,
    dequantize_float8,
    dequantize_int8,
    int8_scales,
    quantize_float8,
    quantize_int8,
    round_float8,
)
from deltafuse.custom_ops.mla.reference import errors, reference, relative_error, rotate, softmax, used_slots
from deltafuse.custom_ops.mla.spec import MlaConfig
from numpy.typing import NDArray

from .configs import BARE, CONFIGS, FULL, STATIC

Arrays = dict[str, NDArray[Any]]
PASTS = ("past_latent", "past_k_rope")


def naive(config: MlaConfig, x: Arrays, b: int, i: int, h: int) -> NDArray[np.float64]:
    """One head's output of one token of a call with a growing or no cache of latents, number by number."""
    nope, rope, rank, wide = (
        config.qk_nope_head_dim,
        config.qk_rope_head_dim,
        config.kv_lora_rank,
        config.v_head_dim,
    )
    weight = x["kv_b_weight"].astype(float).reshape(rank, config.num_heads, nope + wide)[:, h]

    def turned(vector: NDArray[Any], token: int) -> list[float]:
        """By complex numbers."""
        if config.rope == "none":
            return [float(y) for y in vector]
        rows = x["position_ids"] if config.has_position_ids else None
        pick = (lambda t: t[rows[b, token]]) if rows is not None else (lambda t: t[b, token])
        cos, sin = pick(x["cos"]), pick(x["sin"])
        result = [0.0] * rope
        for j in range(rope // 2):
            at = {"half": (j, j + rope // 2)}.get(config.rope, (2 * j, 2 * j + 1))
            to = at if config.rope == "interleaved" else (j, j + rope // 2)
            angle = to[0] if config.cos_width == rope else j
            z = complex(vector[at[0]], vector[at[1]]) * complex(cos[angle], sin[angle])
            result[to[0]], result[to[1]] = z.real, z.imag
        return result

    there = x["past_latent"].shape[1] if config.has_past else 0
    query = x["q"][b, i].astype(float).reshape(config.num_heads, nope + rope)[h]
    query = [*query[:nope], *turned(query[nope:], i)]
    scores, values = [], []
    for j in range(there + x["q"].shape[1]):
        if (config.causal and j > there + i) or (config.window and j <= there + i - config.window):
            continue
        if j < there:
            latent, key_rope = x["past_latent"][b, j].astype(float), list(x["past_k_rope"][b, j].astype(float))
        else:
            latent = x["latent"][b, j - there].astype(float)
            if config.has_kv_norm:
                latent = latent / np.sqrt(np.mean(latent**2) + config.kv_norm_eps) * x["kv_norm_weight"]
            key_rope = turned(x["k_rope"][b, j - there], j - there)
        key = [*(latent @ weight[:, :nope]), *key_rope]
        score = config.scale * sum(p * q for p, q in zip(query, key, strict=True))
        if config.has_q_scale:
            score *= float(x["q_scale"][b, i])
        if config.has_mask:
            mask = x["attn_mask"][b, h, i, j]
            if config.bool_mask and not mask:
                continue
            score += 0.0 if config.bool_mask else float(mask)
        scores.append(score)
        values.append(latent @ weight[:, nope:])
    weights = np.exp(np.array(scores) - max(scores))
    o = (weights[:, None] * np.array(values)).sum(axis=0) / weights.sum()
    return np.asarray(o / (1 + np.exp(-float(x["gate"][b, i, h]))) if config.gate_activation == "sigmoid" else o)


@pytest.mark.parametrize("name", ["full", "window", "fresh-latent"])
@pytest.mark.parametrize("rope", ["none", "half", "interleaved", "deinterleaved"])
@pytest.mark.parametrize("width", [2, 4])
def test_against_a_naive_loop(name: str, rope: str, width: int) -> None:
    config = replace(CONFIGS[name], rope=rope, cos_width=width if rope != "none" else 0)
    if rope == "none":
        config = replace(config, has_position_ids=False)
    inputs = draw_inputs(config, 2, 4, 3, np.random.default_rng(1))
    want = reference(config, inputs)["o"].reshape(2, 4, config.num_heads, config.v_head_dim)
    for b in range(2):
        for i in range(4):
            for h in range(config.num_heads):
                np.testing.assert_allclose(naive(config, inputs, b, i, h), want[b, i, h], rtol=1e-10)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", CONFIGS)
def test_every_case_is_finite_where_it_counts(name: str, case: str) -> None:
    config = CONFIGS[name]
    for tokens in (1, 5):
        inputs = draw_inputs(config, 3, tokens, 40, np.random.default_rng(2), case)
        assert tuple(inputs) == config.input_names()
        want = reference(config, inputs)
        assert np.all(np.isfinite(want["o"]))
        assert set(config.output_names()) <= set(want)
        found = errors(config, inputs, {name: want[name] for name in config.output_names()})
        assert max(found.values()) < 1e-12, found


def test_masked_queries_give_zeros() -> None:
    config = replace(FULL, gate_activation="none")
    inputs = draw_inputs(config, 2, 7, 5, np.random.default_rng(3), "masked-rows")
    o = reference(config, inputs)["o"]
    assert np.all(o[:, ::3] == 0) and np.all(np.any(o[:, 1::3] != 0, axis=-1))
    assert np.all(softmax(np.full((2, 3), -np.inf)) == 0) and softmax(np.zeros((2, 0))).shape == (2, 0)


def test_equal_scores_average_the_values() -> None:
    inputs = draw_inputs(BARE, 1, 6, 0, np.random.default_rng(4), "equal-scores")
    o = reference(BARE, inputs)["o"]
    weight = inputs["kv_b_weight"].astype(float).reshape(16, 2, 16)[:, :, 8:].reshape(16, 16)
    values = inputs["latent"][0].astype(float) @ weight
    np.testing.assert_allclose(o[0, -1], values.mean(axis=0), rtol=1e-10)


@pytest.mark.parametrize("name", ["full", "expanded", "static", "paged", "packed-cache", "expanded-static"])
def test_steps_continue_a_prompt(name: str) -> None:
    config = replace(CONFIGS[name], has_mask=False, bool_mask=False)
    inputs = draw_inputs(config, 2, 9, 24, np.random.default_rng(5))
    whole = reference(config, inputs)
    streams = ("q", "latent", "k_rope", "position_ids", "q_scale", "gate")
    step = dict(inputs)
    for t in range(9):
        step.update({name: inputs[name][:, t : t + 1] for name in streams if name in inputs})
        part = reference(config, step)
        assert relative_error(part["o"], whole["o"][:, t : t + 1]) < 1e-12
        for present, value in part.items():
            if present != "o":
                step[present.replace("present", "past")] = value
        if config.static_cache:
            step["cache_lengths"] = step["cache_lengths"] + 1


def test_paged_static_and_growing_caches_are_the_same_attention() -> None:
    paged = replace(STATIC, paged=True, has_mask=False)
    x = draw_inputs(paged, 3, 4, 40, np.random.default_rng(6), block_size=8)
    want = reference(paged, x)["o"]
    for b, there in enumerate(x["cache_lengths"]):
        at = np.arange(there)
        index = (x["block_table"][b, at // 8], at % 8)
        one = {
            name: value[b : b + 1]
            for name, value in x.items()
            if name in ("q", "latent", "k_rope", "position_ids", "q_scale", "gate")
        }
        one |= {name: x[name] for name in ("kv_b_weight", "kv_norm_weight", "cos", "sin")}
        one |= {name: x[name][index][None] for name in PASTS}
        growing = replace(paged, paged=False, static_cache=False)
        assert relative_error(reference(growing, one)["o"], want[b : b + 1]) < 1e-12
        room = {name: np.concatenate([one[name], np.full((1, 9, one[name].shape[2]), np.nan)], 1) for name in PASTS}
        static = reference(replace(paged, paged=False), {**one, **room, "cache_lengths": np.array([there])})
        assert relative_error(static["o"], want[b : b + 1]) < 1e-12


def test_unused_slots_are_kept_and_not_read() -> None:
    x = draw_inputs(STATIC, 3, 2, 20, np.random.default_rng(7))
    used = used_slots(STATIC, x)
    assert not used.all() and np.isnan(x["past_latent"][~used]).all()
    want = reference(STATIC, x)
    np.testing.assert_array_equal(np.isnan(want["present_latent"]).any(axis=-1), ~used)


def test_rotations_agree_up_to_the_order_of_channels() -> None:
    rng = np.random.default_rng(8)
    x, angle = rng.standard_normal((3, 8)), rng.standard_normal((3, 4))
    cos, sin = np.cos(angle), np.sin(angle)
    spread = np.concatenate([x[:, 0::2], x[:, 1::2]], axis=-1)
    np.testing.assert_array_equal(rotate("deinterleaved", x, cos, sin), rotate("half", spread, cos, sin))
    apart = rotate("interleaved", x, cos, sin)
    np.testing.assert_array_equal(
        rotate("half", spread, cos, sin), np.concatenate([apart[:, 0::2], apart[:, 1::2]], axis=-1)
    )


def test_codes_are_the_nearest_ones() -> None:
    rng = np.random.default_rng(9)
    every = np.arange(256, dtype=np.uint8).view(FLOAT8).astype(np.float64)
    every = np.unique(every[np.isfinite(every)])
    x = np.concatenate([rng.uniform(-450, 450, 500), rng.uniform(-0.1, 0.1, 500), every, (every[1:] + every[:-1]) / 2])
    got = round_float8(x).astype(np.float64)
    nearest = np.abs(np.clip(x, -448, 448)[:, None] - every).min(axis=1)
    np.testing.assert_array_equal(np.abs(got - np.clip(x, -448, 448)), nearest)
    middle = round_float8((every[1:] + every[:-1]) / 2)
    assert np.all(middle.view(np.uint8) % 2 == 0)  # ties to even
    codes, scales = quantize_float8(rng.standard_normal((5, 300)) * 50)
    assert codes.shape == (5, 300) and scales.shape == (5, 3) and np.abs(codes.astype(float)).max() == 448
    zeros, ones = quantize_float8(np.zeros((2, 130)))
    assert np.all(zeros.astype(float) == 0) and np.all(ones == 1)
    assert relative_error(dequantize_float8(*quantize_float8(x[None, :400])), x[None, :400]) < 0.05

    y = rng.standard_normal((200, 6)) * [1, 2, 0, 4, 0.1, 100]
    scales = int8_scales(np.abs(y).max(axis=0))
    back = dequantize_int8(quantize_int8(y, scales), scales)
    assert np.all(np.abs(back - y) <= scales / 2 * 1.0001) and scales[2] == 1
    assert quantize_int8(np.array([[1e9] * 6, [-1e9] * 6]), scales).tolist() == [[127] * 6, [-127] * 6]
    with pytest.raises(ValueError, match="finite"):
        int8_scales(np.array([1.0, np.nan]))


@pytest.mark.parametrize("cache_type", ["int8", "float8"])
def test_an_eight_bit_cache_costs_little(cache_type: str) -> None:
    """What the codes lose, with a latent of a real size: a per cent or two of the outputs."""
    config = replace(CONFIGS["heads-128"], cache_type=cache_type, has_present=True)
    x = draw_inputs(config, 1, 40, 0, np.random.default_rng(10))
    exact = reference(replace(config, cache_type="same"), {**x, "past_latent": np.zeros((1, 0, 512))})["o"]
    assert 1e-3 < relative_error(reference(config, x)["o"], exact) < 0.04


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("full", {"position_ids": np.full((2, 3), TABLE_ROWS)}, "position_ids"),
        ("full", {"position_ids": np.full((2, 3), -1)}, "position_ids"),
        ("static", {"cache_lengths": np.array([0, 18])}, r"cache_lengths\[1\] 18 and 3 new tokens"),
        ("static", {"cache_lengths": np.array([-1, 0])}, r"cache_lengths\[0\] -1"),
        ("paged", {"cache_lengths": np.array([0, 99])}, "the cache has room for 32"),
        ("paged", {"block_table": np.full((2, 2), 77)}, r"block_table\[0\] has ids"),
        ("paged", {"block_table": np.full((2, 2), -1)}, r"block_table\[0\] has ids"),
    ],
)
def test_bad_values(name: str, change: Arrays, reason: str) -> None:
    config = CONFIGS[name]
    inputs = draw_inputs(config, 2, 3, 20, np.random.default_rng(11))
    with pytest.raises(ValueError, match=reason):
        reference(config, {**inputs, **change})


def test_bad_calls_are_refused() -> None:
    inputs = draw_inputs(FULL, 1, 3, 2, np.random.default_rng(12))
    with pytest.raises(ValueError, match="missing inputs: latent"):
        reference(FULL, {name: x for name, x in inputs.items() if name != "latent"})
    for change, reason in (
        ({"rope": "spiral"}, "expected one of none, half"),
        ({"cos_width": 3}, "cos_width 3"),
        ({"window": 2, "causal": 0}, "window 2"),
        ({"paged": True}, "block_table needs"),
        ({"cache": "none"}, "without a cache"),
        ({"cache_type": "int8", "packed_cache": True}, "apart from the rotary keys"),
        ({"has_mask": False, "bool_mask": True}, "bool_mask without"),
        ({"num_heads": 0}, "1 or more"),
        ({"scale": float("inf")}, "not finite"),
    ):
        with pytest.raises(ValueError, match=reason):
            reference(replace(FULL, **change), inputs)
