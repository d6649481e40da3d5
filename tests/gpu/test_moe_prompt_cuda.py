"""Prompts of GroupedQMoE's CUDA kernels: logits by the bfloat16 tensor cores, and every way the products are driven."""

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

from .moe_runner import LAYER as SMALL
from .moe_runner import (
    Call,
    Kernels,
    MoeConfig,
    draw_inputs,
    find_library,
    float8,
    plain,
    reference,
    relative_error,
    to_torch,
    tolerance,
)

if find_library() is None:
    pytest.skip(
        "GroupedQMoE's CUDA kernels: no library; set DELTAFUSE_MOE_LIBRARY or build the plugin", allow_module_level=True
    )


LAYER = replace(SMALL, num_experts=64, top_k=6, hidden_size=192)
PLAIN = plain(LAYER)
FLOAT8 = float8(LAYER)

ROUTERS: dict[str, MoeConfig] = {
    "groups by two": LAYER,
    "groups by the largest": replace(LAYER, group_top=1, topk_group=2),
    "no groups": replace(LAYER, n_group=1, topk_group=1),
    "no bias": replace(LAYER, has_expert_bias=False),
    "router bias": replace(LAYER, has_router_bias=True),
    "masked scores are 0": replace(LAYER, masked_score="0", topk_group=2),
    "masked scores are 0, masked weights": replace(LAYER, masked_score="0", masked_weights=1, topk_group=1, top_k=10),
    "all of the groups' experts": replace(LAYER, topk_group=1, top_k=8),
    "more than the groups have": replace(LAYER, topk_group=1, top_k=12),
    "many groups": replace(LAYER, num_experts=96, n_group=32, topk_group=5, top_k=9),
    "300 experts": replace(LAYER, num_experts=300, n_group=10, topk_group=3, top_k=8, hidden_size=200),
    # The kernels keep to float64 throughout.
    "softmax": replace(LAYER, score_function="softmax"),
    "groups by three": replace(LAYER, group_top=3),
}
CASES = (
    "normal",
    "ties",
    "equal-scores",
    "near-ties",
    "one-expert",
    "two-experts",
    "bias-nan",
    "bias-inf",
    "bias-all-nan",
    "huge-logits",
    "low-logits",
    "large-activations",
)


@pytest.mark.parametrize("router_dtype", ("float32", "bfloat16"))
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", list(ROUTERS))
def test_choices_by_way_of_the_tensor_cores(tuned: Kernels, name: str, case: str, router_dtype: str) -> None:
    """Ids are those of float64 logits, and weights their float32 scores'."""
    config = ROUTERS[name]
    tuned.tune("fast_logits", 1)
    inputs = draw_inputs(config, 70, np.random.default_rng(len(case)), case, "bfloat16", router_dtype=router_dtype)
    want = reference(config, inputs)
    got = tuned.run(config, inputs)
    np.testing.assert_array_equal(got["expert_ids"], want["expert_ids"])
    assert relative_error(got["expert_weights"], want["expert_weights"]) < 1e-6
    assert relative_error(got["y"], want["y"]) <= tolerance("cuda", "bfloat16")


@pytest.mark.parametrize("hidden", (192, 2560))
def test_sums_stay_within_their_bound(tuned: Kernels, hidden: int) -> None:
    """The first pass's errors: what the margin of the choices rests on. Tokens of one sign make large sums."""
    config = replace(LAYER, hidden_size=hidden)
    tuned.tune("fast_logits", 1)
    inputs = draw_inputs(config, 130, np.random.default_rng(6), "normal", "bfloat16")
    inputs["x"][::2] = np.abs(inputs["x"][::2])
    inputs["router_weight"][::3] = np.abs(inputs["router_weight"][::3])
    call = Call(config, {name: to_torch(x, "cuda") for name, x in inputs.items() if name in ("x", "router_weight")})
    tuned.route_only(call, 4)
    torch.cuda.synchronize()
    assert call.workspace is not None
    found = call.workspace[: 130 * config.num_experts * 4].view(torch.float32).cpu().numpy().reshape(130, -1)
    x, weight = inputs["x"].astype(np.float64), inputs["router_weight"].astype(np.float64)
    gamma = 1.05 * (8 * 17 * 2.0**-22 + 2.0**-18 + -(-hidden // 64) * 2.0**-24)
    bound = gamma * np.outer(np.linalg.norm(x, axis=1), np.linalg.norm(weight, axis=1))
    share = np.abs(found - x @ weight.T) / bound
    print(f"errors are {share.max():.3f} of the bound at most")
    assert share.max() < 0.5


def test_choices_are_the_same_with_and_without(tuned: Kernels) -> None:
    """Bit for bit, weights too, where many choices are close."""
    inputs = draw_inputs(LAYER, 600, np.random.default_rng(3), "normal", "bfloat16")
    noise = np.random.default_rng(4).standard_normal(inputs["router_weight"].shape).astype(np.float32)
    inputs["router_weight"] = inputs["router_weight"][:1] + np.float32(3e-6) * noise  # all experts nearly alike
    tuned.tune("fast_logits", 0)
    want = tuned.run(LAYER, inputs)
    tuned.tune("fast_logits", 1)
    got = tuned.run(LAYER, inputs)
    for name in want:
        np.testing.assert_array_equal(got[name], want[name])


@pytest.mark.parametrize(
    "settings",
    (
        {"dynamic": 0},
        {"stages": 2},
        {"keep_weights": 1},
        {"few": 0},
        {"few": 1024},
        {"merge": 0},
        {"by_size": 1},
        {"tokens": 32},
        {"tokens": 96, "dynamic": 0, "merge": 0},
    ),
    ids=lambda settings: ",".join(f"{name}={value}" for name, value in settings.items()),
)
@pytest.mark.parametrize("weights", ("int4:128", "float8:128x128", "plain"))
def test_every_way_gives_equal_bits(tuned: Kernels, weights: str, settings: dict[str, int]) -> None:
    config = {"int4:128": LAYER, "float8:128x128": FLOAT8, "plain": PLAIN}[weights]
    inputs = draw_inputs(config, 200, np.random.default_rng(5), "normal", "bfloat16")
    want = tuned.run(config, inputs)["y"]
    for name, value in settings.items():
        tuned.tune(name, value)
    np.testing.assert_array_equal(tuned.run(config, inputs)["y"], want)


@pytest.mark.parametrize("count", (1, 8, 31, 33, 65, 79, 97, 113, 127, 129, 145, 160, 161, 177, 192, 193, 330))
@pytest.mark.parametrize("weights", ("int4:128", "int8", "float8:128x128", "plain"))
def test_tiles_of_every_size(kernels: Kernels, weights: str, count: int) -> None:
    """An expert that gets all tokens, and one that gets few."""
    config = {
        "int4:128": LAYER,
        "int8": replace(LAYER, weight_format="int8", shared_format="int8"),
        "float8:128x128": FLOAT8,
        "plain": PLAIN,
    }[weights]
    config = replace(
        config, num_experts=2, top_k=1, n_group=1, topk_group=1, has_router_weight=False, has_expert_bias=False
    )
    inputs = draw_inputs(config, count, np.random.default_rng(count), "normal", "bfloat16")
    inputs["router_logits"][:] = np.array([3.0, -3.0])
    inputs["router_logits"][: count // 9] = np.array([-3.0, 3.0])
    error = relative_error(kernels.run(config, inputs)["y"], reference(config, inputs)["y"])
    eight = weights.startswith("float8")
    assert error <= tolerance("cuda", "float8_activations" if eight else "bfloat16"), f"{error:.2e}"


@pytest.mark.parametrize("shape", ({}, {"intermediate_size": 384, "shared_intermediate_size": 128}))
def test_float8_keeps_small_tokens_and_outlying_channels(kernels: Kernels, shape: dict[str, int]) -> None:
    """Rows of activations have one scale: some channels are 100 times the others, and tokens of three sizes."""
    config = replace(FLOAT8, **shape)
    inputs = draw_inputs(config, 240, np.random.default_rng(8), "normal", "bfloat16")
    x = inputs["x"].astype(np.float32)
    x[:, ::41] *= 100.0
    size = np.array([1e-2, 1.0, 10.0], dtype=np.float32)[np.arange(len(x)) % 3]
    inputs["x"] = (x * size[:, None]).astype(inputs["x"].dtype)
    want, got = reference(config, inputs)["y"], kernels.run(config, inputs)["y"]
    for group in range(3):
        error = relative_error(got[group::3], want[group::3])
        assert error <= tolerance("cuda", "float8_activations"), f"tokens of size {size[group]}: {error:.2e}"


def test_only_what_exists_is_tuned(kernels: Kernels) -> None:
    with pytest.raises(ValueError, match="nothing"):
        kernels.tune("nothing", 1)
