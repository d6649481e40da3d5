"""LatentAttention's CUDA kernels against the float64 reference. Needs a GPU, PyTorch and the built library."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("LatentAttention's CUDA kernels: PyTorch is not installed", allow_module_level=True)
import torch

if not torch.cuda.is_available():
    pytest.skip("LatentAttention's CUDA kernels: no GPU here", allow_module_level=True)

from mla.configs import BARE, CONFIGS, FULL, STATIC

from .mla_runner import Call, Kernels, MlaConfig, find_library, to_device

if find_library() is None:
    pytest.skip(
        "LatentAttention's CUDA kernels: no library; set DELTAFUSE_MLA_LIBRARY or build the plugin",
        allow_module_level=True,
    )

from .mla_runner import draw_inputs, errors, tolerance

DTYPES = ("float32", "float16", "bfloat16")
HALVES = ("float16", "bfloat16")

#: The real widths, which the fast kernels take.
REAL = MlaConfig(
    num_heads=4,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    kv_lora_rank=512,
    scale=192**-0.5,
    rope="half",
    gate_activation="sigmoid",
    cache="latent",
    has_kv_norm=True,
    has_position_ids=True,
    cos_width=64,
    has_past=True,
    has_present=True,
)
REAL_STATIC = replace(REAL, static_cache=True)
#: Every form of cache that the fast kernels read.
REAL_CACHES: dict[str, MlaConfig] = {
    "growing": REAL,
    "growing, packed": replace(REAL, packed_cache=True, packed_latent=True),
    "static": REAL_STATIC,
    "static, packed": replace(REAL_STATIC, packed_cache=True),
    "static, unwritten": replace(REAL_STATIC, has_present=False),
    "paged": replace(REAL_STATIC, paged=True),
    "paged, packed": replace(REAL_STATIC, paged=True, packed_cache=True),
    "int8": replace(REAL, cache_type="int8"),
    "int8, static": replace(REAL_STATIC, cache_type="int8"),
    "int8, paged": replace(REAL_STATIC, cache_type="int8", paged=True),
    "float8": replace(REAL, cache_type="float8"),
    "float8, static": replace(REAL_STATIC, cache_type="float8"),
    "float8, paged": replace(REAL_STATIC, cache_type="float8", paged=True),
    "expanded": replace(REAL, cache="expanded"),
    "expanded, static": replace(REAL_STATIC, cache="expanded"),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "no gate, no norm": {"gate_activation": "none", "has_kv_norm": False},
    "temperature": {"has_q_scale": True},
    "interleaved": {"rope": "interleaved", "cos_width": 32},
    "deinterleaved": {"rope": "deinterleaved"},
    "no rope": {"rope": "none", "cos_width": 0, "has_position_ids": False},
    "all see all": {"causal": 0},
    "window": {"window": 70},
    "mask": {"has_mask": True},
    "bool mask": {"has_mask": True, "bool_mask": True},
}


@pytest.fixture(scope="module")
def kernels() -> Iterator[Kernels]:
    library = find_library()
    assert library is not None
    yield Kernels(library)


def check(
    kernels: Kernels,
    config: MlaConfig,
    batch: int,
    seq_len: int,
    past_len: int,
    dtype: str,
    case: str = "normal",
    in_place: bool = False,
    **draw: Any,
) -> None:
    rng = np.random.default_rng([batch, seq_len, past_len, len(case)])
    inputs = draw_inputs(config, batch, seq_len, past_len, rng, case, dtype, **draw)
    got = kernels.run(config, inputs, in_place)
    assert set(got) == set(config.output_names())
    allowed = tolerance("cuda", dtype, case, config.cache_type)
    for name, error in errors(config, inputs, got).items():
        assert error <= allowed, f"{name}: relative error {error:.2e}, tolerance {allowed:.0e}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 3, 20])
@pytest.mark.parametrize("name", CONFIGS)
def test_small_and_odd(kernels: Kernels, name: str, tokens: int, dtype: str) -> None:
    config = CONFIGS[name]
    check(kernels, config, 2, tokens, 24 if config.has_past else 0, dtype)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("tokens", [1, 2, 16, 17, 150])
@pytest.mark.parametrize("name", REAL_CACHES)
def test_caches(kernels: Kernels, name: str, tokens: int, dtype: str) -> None:
    block = 64 if tokens % 2 else 16
    check(kernels, REAL_CACHES[name], 2, tokens, 200, dtype, in_place=tokens != 16, block_size=block)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 5, 130])
@pytest.mark.parametrize("option", OPTIONS)
def test_options(kernels: Kernels, option: str, tokens: int, dtype: str) -> None:
    for config in (REAL, REAL_STATIC):
        check(kernels, replace(config, **OPTIONS[option]), 2, tokens, 300, dtype, shared=tokens == 5)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("past", [0, 1, 62, 63, 64, 65, 127, 128, 511, 512, 513, 1100])
def test_lengths_of_decode(kernels: Kernels, past: int, dtype: str) -> None:
    check(kernels, REAL, 1, 1, past, dtype)


@pytest.mark.parametrize("past", [8191, 8300, 20000])
def test_long_decode(kernels: Kernels, past: int) -> None:
    for config in (REAL, replace(REAL, window=3000), replace(REAL, cache_type="int8")):
        check(kernels, config, 1, 2, past, "bfloat16")


@pytest.mark.parametrize("heads", [1, 2, 16, 32, 40, 64, 128])
def test_heads(kernels: Kernels, heads: int) -> None:
    config = replace(REAL_STATIC, num_heads=heads)
    check(kernels, config, 2, 1, 300, "bfloat16", in_place=True)
    check(kernels, config, 1, 3, 300, "float16", in_place=True)
    check(kernels, config, 1, 40, 300, "bfloat16", in_place=True)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    ("tokens", "past"), [(127, 0), (128, 0), (129, 0), (300, 0), (64, 64), (100, 200), (256, 1000)]
)
def test_lengths_of_prompts(kernels: Kernels, tokens: int, past: int, dtype: str) -> None:
    config = replace(REAL, has_past=past > 0)
    check(kernels, config, 1, tokens, past, dtype)
    check(kernels, replace(config, window=90), 1, tokens, past, dtype)
    check(kernels, replace(config, causal=0), 2, tokens, past, dtype)
    check(kernels, replace(config, cache="none", has_past=False, has_present=False), 2, tokens, 0, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 4, 140])
@pytest.mark.parametrize("case", ["huge-scores", "equal-scores", "empty-cache", "full-cache", "large-values"])
def test_hostile_inputs(kernels: Kernels, case: str, tokens: int, dtype: str) -> None:
    for config in (REAL_STATIC, replace(REAL_STATIC, paged=True), replace(REAL_STATIC, cache="expanded")):
        check(kernels, config, 2, tokens, 256, dtype, case)


def test_new_tokens_are_not_rounded_in_plain_kernels(kernels: Kernels) -> None:
    """In this draw two keys score nearly the same, one of them new: as the cache holds it, the output is 1.4 % off."""
    config = CONFIGS["static-all-see-all"]
    inputs = draw_inputs(config, 2, 5, 75, np.random.default_rng(5), "huge-scores", "float16")
    worst = errors(config, inputs, kernels.run(config, inputs))["o"]
    assert worst <= tolerance("cuda", "float16") / 4, worst


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bool_mask", [False, True])
@pytest.mark.parametrize("tokens", [1, 4, 33])
def test_rows_that_see_nothing(kernels: Kernels, tokens: int, bool_mask: bool, dtype: str) -> None:
    for config in (FULL, REAL, replace(REAL, cache="expanded")):
        config = replace(config, has_mask=True, bool_mask=bool_mask)
        check(kernels, config, 2, tokens, 100, dtype, "masked-rows")
    check(kernels, config, 2, tokens, 100, dtype, mask_dtype="" if bool_mask else "float32")


@pytest.mark.parametrize("lengths_dtype", ["int32", "int64"])
@pytest.mark.parametrize("cos_dtype", ["float32", "bfloat16"])
def test_types_of_operands(kernels: Kernels, lengths_dtype: str, cos_dtype: str) -> None:
    config = replace(REAL_STATIC, has_position_ids=False)
    for tokens in (1, 70):
        check(kernels, config, 3, tokens, 128, "bfloat16", lengths_dtype=lengths_dtype, cos_dtype=cos_dtype)


def _call(kernels: Kernels, config: MlaConfig, batch: int, seq_len: int, past: int, dtype: str = "bfloat16") -> Call:
    inputs = draw_inputs(config, batch, seq_len, past, np.random.default_rng(5), "normal", dtype)
    return kernels.prepare(Call(config, {name: to_device(np.asarray(x)) for name, x in inputs.items()}))


@pytest.mark.parametrize(("seq_len", "past"), [(1, 9000), (4, 700), (300, 100)])
@pytest.mark.parametrize("config", [REAL, replace(REAL, cache_type="float8")], ids=["16 bits", "8 bits"])
def test_two_runs_agree_bit_for_bit(kernels: Kernels, config: MlaConfig, seq_len: int, past: int) -> None:
    call = _call(kernels, config, 2, seq_len, past)
    kernels.launch(call)
    first = {name: x.clone() for name, x in call.outputs.items()}
    for _ in range(2):
        kernels.launch(call)
        for name, x in first.items():
            assert torch.equal(x.view(torch.uint8), call.outputs[name].view(torch.uint8)), name
    kernels.release(call)


@pytest.mark.parametrize("cache_type", ["same", "int8", "float8"])
@pytest.mark.parametrize("heads", [4, 32])
def test_a_row_does_not_see_the_batch(kernels: Kernels, heads: int, cache_type: str) -> None:
    """Alone or among many, a row's output has the same bits, whatever the others' lengths are."""
    config = replace(REAL_STATIC, num_heads=heads, cache_type=cache_type)
    inputs = draw_inputs(config, 40, 1, 3000, np.random.default_rng(7), "normal", "bfloat16")
    inputs["cache_lengths"][:3] = (2999, 1500, 0)
    for name in ("past_latent", "past_k_rope"):
        inputs[name] = np.nan_to_num(inputs[name].astype(np.float32), nan=0.5).astype(inputs[name].dtype)
    if cache_type == "float8":
        inputs["past_latent_scale"] = np.nan_to_num(inputs["past_latent_scale"], nan=0.25)
    whole = kernels.run(config, inputs)["o"]
    for count in (1, 2, 11):
        alone = {
            name: x[:count] if name in ("q", "latent", "k_rope", "position_ids", "cache_lengths", "gate")
            or (name.startswith("past") and x.ndim == 3) else x
            for name, x in inputs.items()
        }  # fmt: skip
        assert np.array_equal(kernels.run(config, alone)["o"], whole[:count])


#: What a block may make of the same sequences: tiles, sections or chapters.
WAYS = ({"grain": 0}, {"grain": 1}, {"grain": 2})


@pytest.mark.parametrize(
    ("heads", "cache_type", "dtype", "longest"),
    [
        (32, "same", "bfloat16", 3000),
        (32, "same", "float16", 9000),
        (8, "int8", "bfloat16", 1500),
        (8, "float8", "float16", 1500),
        (64, "same", "bfloat16", 1400),
        (64, "same", "bfloat16", 9000),
    ],
)
def test_every_way_to_cut_gives_the_same_bits(
    kernels: Kernels, heads: int, cache_type: str, dtype: str, longest: int
) -> None:
    config = replace(REAL_STATIC, num_heads=heads, cache_type=cache_type)
    inputs = draw_inputs(config, 3, 1, longest, np.random.default_rng(3), "normal", dtype)
    inputs["cache_lengths"][:] = (longest - 1, longest // 2 + 3, 77)
    for name in ("past_latent", "past_k_rope"):
        inputs[name] = np.nan_to_num(inputs[name].astype(np.float32), nan=0.5).astype(inputs[name].dtype)
    if cache_type == "float8":
        inputs["past_latent_scale"] = np.nan_to_num(inputs["past_latent_scale"], nan=0.25)
    try:
        kernels.choose(**WAYS[0])
        first = kernels.run(config, inputs)
        worst = errors(config, inputs, first)
        assert max(worst.values()) <= tolerance("cuda", dtype, "normal", cache_type), worst
        for way in WAYS[1:]:
            kernels.choose(**way)
            assert np.array_equal(kernels.run(config, inputs)["o"], first["o"]), way
    finally:
        kernels.choose()


@pytest.mark.parametrize(("batch", "heads"), [(3, 8), (40, 4), (7, 40)])
def test_short_sequences_in_a_large_cache(kernels: Kernels, batch: int, heads: int) -> None:
    """What blocks make is chosen from the lengths, on the device, by both kernels alike."""
    config = replace(REAL_STATIC, num_heads=heads)
    inputs = draw_inputs(config, batch, 1, 10000, np.random.default_rng(3), "full-cache", "bfloat16")
    lengths = np.random.default_rng(4).integers(0, 700, batch)
    for longest in (700, 9000):
        lengths[batch // 2] = longest
        inputs["cache_lengths"][:] = lengths
        kernels.choose()
        chosen = kernels.run(config, inputs, in_place=True)["o"]
        worst = errors(config, inputs, {"o": chosen})
        assert worst["o"] <= tolerance("cuda", "bfloat16"), worst
        try:
            for grain in (1, 2):
                kernels.choose(grain=grain)
                assert np.array_equal(kernels.run(config, inputs, in_place=True)["o"], chosen), grain
        finally:
            kernels.choose()


@pytest.mark.parametrize("cache_type", ["int8", "float8"])
@pytest.mark.parametrize("dtype", HALVES)
def test_every_code_is_read_exactly(kernels: Kernels, cache_type: str, dtype: str) -> None:
    """All earlier tokens are the same one, which has every code: the output shows each."""
    config = replace(REAL_STATIC, cache_type=cache_type, gate_activation="none")
    inputs = draw_inputs(config, 2, 1, 64, np.random.default_rng(3), "normal", dtype)
    codes = inputs["past_latent"]
    every = np.arange(512, dtype=np.uint16).astype(np.uint8)
    every[every == 0x80] = 0  # int8: not a code; float8: minus zero
    every[(every & 0x7F) == 0x7F] = 0x7E if cache_type == "float8" else 0x7F
    codes[...] = every.view(codes.dtype)
    inputs["cache_lengths"][:] = (40, 63)
    rope = inputs["past_k_rope"]  # where it was no token's before: NaN
    inputs["past_k_rope"] = np.nan_to_num(rope.astype(np.float32), nan=0.5).astype(rope.dtype)
    inputs["past_latent_scale"] = np.nan_to_num(inputs["past_latent_scale"], nan=0.01)
    got = kernels.run(config, inputs)
    worst = errors(config, inputs, got)
    assert max(worst.values()) <= tolerance("cuda", dtype, "normal", cache_type), worst


@pytest.mark.parametrize(("seq_len", "past"), [(1, 1000), (200, 50)])
def test_replayed_from_a_graph(kernels: Kernels, seq_len: int, past: int) -> None:
    call = _call(kernels, REAL, 2, seq_len, past)
    kernels.launch(call)
    torch.cuda.synchronize()
    direct = {name: x.clone() for name, x in call.outputs.items()}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernels.launch(call)
    for x in call.outputs.values():
        x.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    for name, x in direct.items():
        assert torch.equal(x, call.outputs[name]), name
    kernels.release(call)


def test_weights_by_call_or_by_layer(kernels: Kernels) -> None:
    inputs = draw_inputs(REAL, 1, 1, 100, np.random.default_rng(5), "normal", "bfloat16")
    by_layer, by_call = (kernels.run(REAL, inputs, keep_weights=keep)["o"] for keep in (True, False))
    assert np.array_equal(by_layer, by_call)


@pytest.mark.parametrize(("tokens", "dtype"), [(1, "bfloat16"), (40, "bfloat16"), (3, "float32")])
def test_weights_that_another_node_makes_anew(kernels: Kernels, tokens: int, dtype: str) -> None:
    """As those that are dequantized in the graph: a call reads what is there when it runs."""
    inputs = draw_inputs(REAL_STATIC, 2, tokens, 100, np.random.default_rng(5), "normal", dtype)
    call = Call(REAL_STATIC, {name: to_device(np.asarray(x)) for name, x in inputs.items()})
    kernels.prepare(call, keep_weights=False)
    for factor in (1.0, -0.5):
        weights = (inputs["kv_b_weight"].astype(np.float32) * factor).astype(inputs["kv_b_weight"].dtype)
        call.tensors["kv_b_weight"].copy_(to_device(weights))
        kernels.launch(call)
        torch.cuda.synchronize()
        got = {"o": np.asarray(call.outputs["o"].to("cpu", torch.float64).numpy())}
        worst = errors(REAL_STATIC, inputs | {"kv_b_weight": weights}, got)
        assert worst["o"] <= tolerance("cuda", dtype), worst
    kernels.release(call)


@pytest.mark.parametrize("tokens", [1, 30])
@pytest.mark.parametrize("config", [STATIC, REAL_STATIC], ids=["small", "real"])
def test_wrong_values_are_found(kernels: Kernels, config: MlaConfig, tokens: int) -> None:
    """A position, a length or a block id out of range is reported and nothing outside is touched."""
    config = replace(config, has_mask=False, paged=True)
    good = draw_inputs(config, 2, tokens, 64, np.random.default_rng(5), "normal", "bfloat16")
    for name, value, fault in (
        ("position_ids", 300, 1),
        ("position_ids", -1, 1),
        ("cache_lengths", -1, 2),
        ("cache_lengths", 64, 2),
        ("block_table", 99, 3),
        ("block_table", -2, 3),
    ):
        inputs = {key: np.array(x) for key, x in good.items()}
        inputs[name][1, ...] = value
        if name == "block_table":
            inputs["block_table"] = good["block_table"].copy()
            inputs["block_table"][1, 0] = value
        with pytest.raises(ValueError, match=f"fault {fault}"):
            kernels.run(config, inputs)
    kernels.run(config, good)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_heads": 0}, "num_heads 0"),
        ({"kv_lora_rank": 900}, "kv_lora_rank \\+ qk_rope_head_dim 964: kernels take up to"),
        ({"dtype": 7}, "element type 7"),
        ({"cos_width": 5}, "cos has 5 columns"),
        ({"qk_rope_head_dim": 63}, "the rotation needs an even number"),
    ],
    ids=str,
)
def test_refused_with_a_reason(kernels: Kernels, change: dict[str, int], words: str) -> None:
    call = _call(kernels, REAL, 1, 5, 10)
    assert kernels.refusal(call.params) is None
    assert "compute capability 7.5" in str(kernels.refusal(call.params, 75))
    for name, value in change.items():
        setattr(call.params, name, value)
    with pytest.raises(RuntimeError, match=words):
        kernels.launch(call)
    assert torch.isnan(call.outputs["o"]).all(), "a refused call must not write"


def test_missing_operands_are_refused(kernels: Kernels) -> None:
    call = _call(kernels, REAL, 1, 5, 10)
    call.params.past_latent = None
    with pytest.raises(RuntimeError, match="past_latent is required"):
        kernels.launch(call)


def test_nothing_to_do(kernels: Kernels) -> None:
    """A batch of no rows, and no new tokens."""
    for batch, tokens in ((0, 3), (2, 0)):
        config = replace(BARE, cache="latent", has_past=True, has_present=True)
        inputs = draw_inputs(config, batch, tokens, 4, np.random.default_rng(5))
        got = kernels.run(config, inputs)
        assert got["o"].size == 0
        assert np.array_equal(got["present_latent"][:, :4], inputs["past_latent"].astype(np.float64))
