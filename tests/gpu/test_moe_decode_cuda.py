"""Calls of a few tokens: every way that the CUDA kernels may be driven gives the right result."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import numpy as np
import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("GroupedQMoE's CUDA kernels: PyTorch is not installed", allow_module_level=True)
import torch

if not torch.cuda.is_available():
    pytest.skip("GroupedQMoE's CUDA kernels: no GPU here", allow_module_level=True)

from .moe_runner import Kernels, MoeConfig, draw_inputs, find_library

if find_library() is None:
    pytest.skip(
        "GroupedQMoE's CUDA kernels: no library; set DELTAFUSE_MOE_LIBRARY or build the plugin", allow_module_level=True
    )

from .moe_runner import LAYER as SMALL
from .moe_runner import float8, plain, reference, relative_error, tolerance

LAYER = replace(SMALL, num_experts=64, top_k=8, hidden_size=384, intermediate_size=256, norm_eps=0.0)
#: Settings of ``DecodeTuning`` (moe_decode.h), beside its own.
TUNINGS: tuple[dict[str, int], ...] = (
    {"split": 1},
    {"split": 4},
    {"split": 8},
    {"first_threads": 256, "split": 8},
    {"first_threads": 256, "split": 1, "first_blocks": 4},
    {"first_blocks": 1},
    {"second_threads": 64, "many_threads": 64},
    {"second_threads": 128, "many_threads": 128},
    {"dependent": 0, "prefetch": 0},
)


def check(kernels: Kernels, config: MoeConfig, tokens: int, case: str = "normal", dtype: str = "bfloat16") -> None:
    inputs = draw_inputs(config, tokens, np.random.default_rng(tokens), case, dtype)
    want, got = reference(config, inputs), kernels.run(config, inputs)
    np.testing.assert_array_equal(got["expert_ids"], want["expert_ids"])
    assert relative_error(got["expert_weights"], want["expert_weights"]) < 1e-6
    # Prompts of float8 weights have float8 activations too.
    allowed = tolerance("cuda", "float8_activations" if config.weight_format == "float8" else dtype)
    assert relative_error(got["y"], want["y"]) <= allowed


@pytest.mark.parametrize("tuning", TUNINGS, ids=lambda t: ",".join(f"{k}={v}" for k, v in t.items()))
@pytest.mark.parametrize("tokens", (1, 8, 32))
def test_tunings(tuned: Kernels, tuning: dict[str, int], tokens: int) -> None:
    for name, value in tuning.items():
        tuned.tune(f"decode_{name}", value)
    check(tuned, LAYER, tokens)


def test_bad_tunings_are_refused(tuned: Kernels) -> None:
    for name, value in (("split", 3), ("first_threads", 1024), ("tokens", 33), ("nothing", 1)):
        with pytest.raises(ValueError, match=name):
            tuned.tune(f"decode_{name}", value)


@pytest.mark.parametrize("split", (1, 2, 8))
@pytest.mark.parametrize("tokens", (1, 5))
def test_fewer_stages_than_warps(tuned: Kernels, tokens: int, split: int) -> None:
    """Warps that share rows have no stage of some tasks, or of all."""
    tuned.tune("decode_split", split)
    shape = replace(LAYER, hidden_size=72, intermediate_size=40, shared_intermediate_size=200, weight_format="int8")
    check(tuned, replace(shape, shared_format="int8", block_size=0), tokens)
    check(tuned, replace(shape, shared_format="float", shared_block_size=0, hidden_size=328), tokens)


@pytest.mark.parametrize("case", ("one-expert", "two-experts", "equal-scores", "ties"))
@pytest.mark.parametrize("tokens", (9, 16, 31))
def test_many_tokens_of_one_expert(kernels: Kernels, tokens: int, case: str) -> None:
    check(kernels, LAYER, tokens, case)


@pytest.mark.parametrize("case", ("normal", "ties", "equal-scores", "near-ties", "bias-nan", "bias-all-nan"))
@pytest.mark.parametrize(
    "groups",
    (
        {},
        {"topk_group": 1},
        {"topk_group": 8},
        {"num_experts": 288, "n_group": 3, "topk_group": 2},
        {"group_top": 1, "masked_score": "0", "masked_weights": True},
    ),
    ids=str,
)
def test_one_token_chosen_by_a_block(tuned: Kernels, groups: dict[str, object], case: str) -> None:
    """Groups of whole warps; by warps alone with 256 threads, and by the prompts' kernels."""
    few = replace(LAYER, **{"hidden_size": 128, "intermediate_size": 128, "num_experts": 256, **groups})
    check(tuned, few, 1, case)
    tuned.tune("decode_first_threads", 256)
    check(tuned, few, 1, case)
    tuned.tune("decode_tokens", 0)
    check(tuned, few, 1, case)


def test_as_many_pairs_as_there_may_be(kernels: Kernels) -> None:
    check(kernels, replace(LAYER, top_k=16), 32)
    check(kernels, replace(LAYER, top_k=32, topk_group=8), 16)
    check(kernels, replace(LAYER, top_k=32, topk_group=8), 1)


def test_activations_that_do_not_fit_shared_memory(kernels: Kernels) -> None:
    """One token whose activations are read as they are needed."""
    check(kernels, replace(LAYER, num_experts=8, hidden_size=128, intermediate_size=2048, n_group=1, topk_group=1), 1)


@pytest.mark.parametrize("tokens", (1, 4, 20))
def test_a_gate_beside_given_logits(kernels: Kernels, tokens: int) -> None:
    check(kernels, replace(LAYER, has_router_weight=False, has_shared_gate=True, has_router_bias=True), tokens)


@pytest.mark.parametrize(
    ("layer", "limit"), ((LAYER, 32), (plain(LAYER), 8), (float8(LAYER), 8)), ids=("int4", "plain", "float8")
)
def test_where_prompts_begin(tuned: Kernels, layer: MoeConfig, limit: int) -> None:
    """By format, and both ways on each side of it."""
    for tokens in (limit - 1, limit, limit + 1):
        check(tuned, layer, tokens, dtype="float16")
    for setting in (0, 32):
        tuned.tune("decode_tokens", setting)
        check(tuned, layer, limit, dtype="float16")
        check(tuned, layer, 20)
