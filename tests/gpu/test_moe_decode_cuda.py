"""Calls of a few tokens: every way that the CUDA kernels may be driven gives the right result."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
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

from .moe_runner import reference, relative_error, tolerance

LAYER = MoeConfig(
    num_experts=64,
    top_k=8,
    hidden_size=384,
    intermediate_size=256,
    shared_intermediate_size=128,
    n_group=8,
    topk_group=4,
    routed_scaling_factor=2.5,
    block_size=128,
    shared_block_size=128,
    weight_format="int4",
    shared_format="int4",
    has_expert_bias=True,
    has_ids=True,
)
#: Settings of ``DecodeTuning`` (moe_decode.h), beside its own.
DEFAULTS = {
    "tokens": 32,
    "first_threads": 512,
    "first_blocks": 0,
    "split": 2,
    "second_threads": 256,
    "many_threads": 384,
    "dependent": 1,
    "prefetch": 3,
}
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


@pytest.fixture(scope="module")
def kernels() -> Iterator[Kernels]:
    library = find_library()
    assert library is not None
    yield Kernels(library)


@pytest.fixture
def tuned(kernels: Kernels) -> Iterator[Kernels]:
    """The kernels; what a test tunes is put back."""
    yield kernels
    for name, value in DEFAULTS.items():
        kernels.tune(f"decode_{name}", value)


def check(kernels: Kernels, config: MoeConfig, tokens: int, case: str = "normal", dtype: str = "bfloat16") -> None:
    inputs = draw_inputs(config, tokens, np.random.default_rng(tokens), case, dtype)
    want, got = reference(config, inputs), kernels.run(config, inputs)
    np.testing.assert_array_equal(got["expert_ids"], want["expert_ids"])
    assert relative_error(got["expert_weights"], want["expert_weights"]) < 1e-6
    assert relative_error(got["y"], want["y"]) <= tolerance("cuda", dtype)


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


@pytest.mark.parametrize("tokens", (31, 32, 33))
def test_where_prompts_begin(tuned: Kernels, tokens: int) -> None:
    check(tuned, LAYER, tokens, dtype="float16")
    tuned.tune("decode_tokens", 0)
    check(tuned, LAYER, tokens, dtype="float16")
    tuned.tune("decode_tokens", 32)
