"""GroupedQMoE's CUDA kernels against the float64 reference. Needs a GPU, PyTorch and the built library."""

from __future__ import annotations

import ctypes
import importlib.util
from dataclasses import replace

import numpy as np
import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("GroupedQMoE's CUDA kernels: PyTorch is not installed", allow_module_level=True)
import torch

if not torch.cuda.is_available():
    pytest.skip("GroupedQMoE's CUDA kernels: no GPU here", allow_module_level=True)

from .moe_runner import Call, Kernels, MoeConfig, draw_inputs, find_library, to_torch

if find_library() is None:
    pytest.skip(
        "GroupedQMoE's CUDA kernels: no library; set DELTAFUSE_MOE_LIBRARY or build the plugin", allow_module_level=True
    )

from .moe_runner import LAYER, float8, plain, reference, relative_error, tolerance

DTYPES = ("float32", "float16", "bfloat16")

PLAIN = plain(LAYER)
FLOAT8 = float8(LAYER)
#: The geometry of the small exports.
SMALL = MoeConfig(
    16, 4, 64, 32, 32, n_group=4, topk_group=2, routed_scaling_factor=2.5, has_expert_bias=True, has_ids=True
)

CONFIGS: dict[str, MoeConfig] = {
    "int4:128": LAYER,
    "int4:32": replace(LAYER, block_size=32, shared_block_size=32),
    "int4:64, plain shared expert": replace(LAYER, block_size=64, shared_format="float", shared_block_size=0),
    "int4, a scale a row": replace(LAYER, block_size=0, shared_block_size=0),
    "int4:128 with zero points": replace(LAYER, has_zero_point=True, shared_has_zero_point=True),
    "uint4:32 with zero points": replace(
        LAYER, weight_format="uint4", shared_format="uint4", block_size=32, shared_block_size=32, has_zero_point=True
    ),
    "uint4 without zero points": replace(LAYER, weight_format="uint4", shared_format="uint4"),
    "int8, a scale a row": replace(
        LAYER, weight_format="int8", shared_format="int8", block_size=0, shared_block_size=0
    ),
    "int8:128": replace(LAYER, weight_format="int8", shared_format="int8"),
    "uint8:32 with zero points": replace(
        LAYER, weight_format="uint8", shared_format="uint8", block_size=32, shared_block_size=64, has_zero_point=True,
        shared_has_zero_point=True,
    ),
    "float8:128x128": FLOAT8,
    "float8, a scale a row": replace(FLOAT8, block_size=0, block_rows=1, shared_block_size=0, shared_block_rows=1),
    "float8:32": replace(FLOAT8, block_size=32, block_rows=16),
    "plain": PLAIN,
    "bfloat16 weights": replace(PLAIN, weight_format="bfloat16", shared_format="bfloat16"),
    "int4:128 with int8 shared": replace(LAYER, shared_format="int8"),
    "no shared expert": replace(LAYER, shared_intermediate_size=0, shared_format="float", shared_block_size=0),
    "shared expert with a gate": replace(LAYER, has_shared_gate=True, shared_intermediate_size=384),
    "blocks that no stage fits": replace(LAYER, block_size=48, shared_block_size=10),
    "odd sizes": replace(
        PLAIN, hidden_size=99, intermediate_size=37, shared_intermediate_size=51, has_router_bias=True
    ),
    "odd sizes, int8": replace(
        LAYER, hidden_size=99, intermediate_size=37, shared_intermediate_size=51, weight_format="int8",
        shared_format="int8", block_size=32, shared_block_size=0,
    ),
    "sizes past a tile": replace(LAYER, hidden_size=328, intermediate_size=200, shared_intermediate_size=136),
    "small export": SMALL,
    "small export, int4:32": replace(SMALL, weight_format="int4", block_size=32, has_router_bias=True),
    "logits given": replace(LAYER, has_router_weight=False, has_router_bias=True),
    "softmax, no groups": replace(
        LAYER, score_function="softmax", n_group=1, topk_group=1, has_expert_bias=False, norm_topk_prob=0, top_k=8
    ),
    "masked scores are 0, masked weights": replace(
        LAYER, masked_score="0", masked_weights=1, topk_group=1, top_k=6, norm_eps=1e-9, group_top=1
    ),
    "one expert": replace(LAYER, num_experts=1, top_k=1, n_group=1, topk_group=1, group_top=1),
    "many experts, many groups": replace(LAYER, num_experts=320, n_group=40, topk_group=7, top_k=12, group_top=3),
    "gelu": replace(LAYER, activation="gelu"),
    "gelu by tanh": replace(LAYER, activation="gelu_tanh"),
    "not gated, squared relu": replace(LAYER, activation="relu2", gated=0),
    "not gated, float8": replace(FLOAT8, activation="relu2", gated=0, intermediate_size=256),
    "clamp before": replace(LAYER, clamp="before", gate_limit=0.7, up_limit=0.5),
    "clamp after": replace(LAYER, clamp="after", gate_limit=0.3, up_limit=0.5),
}  # fmt: skip

CASES = (
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
    "zero-tokens",
    "zero-scales",
    "extreme-weights",
    "large-activations",
)
TOKENS = (1, 7, 32, 33, 150)


def allowed(config: MoeConfig, dtype: str) -> float:
    """Prompts of float8 weights also have float8 activations."""
    eight = config.weight_format == "float8" and dtype != "float32"
    return tolerance("cuda", "float8_activations" if eight else dtype)


def check(
    kernels: Kernels,
    config: MoeConfig,
    tokens: int,
    dtype: str,
    case: str = "normal",
    scale_dtype: str = "float32",
    router_dtype: str = "float32",
) -> None:
    rng = np.random.default_rng([tokens, len(case)])
    inputs = draw_inputs(config, tokens, rng, case, dtype, scale_dtype=scale_dtype, router_dtype=router_dtype)
    want = reference(config, inputs)
    got = kernels.run(config, inputs)
    assert set(got) == set(config.output_names())
    if config.has_ids:
        np.testing.assert_array_equal(got["expert_ids"], want["expert_ids"])
        assert relative_error(got["expert_weights"], want["expert_weights"]) < 1e-6
    error = relative_error(got["y"], want["y"])
    assert error <= allowed(config, dtype), f"y: {error:.2e} (allowed {allowed(config, dtype):.0e})"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", list(CONFIGS))
@pytest.mark.parametrize("tokens", TOKENS)
def test_configurations(kernels: Kernels, name: str, tokens: int, dtype: str) -> None:
    check(kernels, CONFIGS[name], tokens, dtype)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("tokens", (1, 9, 70))
@pytest.mark.parametrize(("name", "dtype"), [("int4:128", "bfloat16"), ("int8:128", "float16"), ("plain", "float32")])
def test_hostile_inputs(kernels: Kernels, name: str, tokens: int, case: str, dtype: str) -> None:
    check(kernels, CONFIGS[name], tokens, dtype, case)


@pytest.mark.parametrize("dtype", ("float16", "bfloat16"))
@pytest.mark.parametrize("tokens", (2, 90))
def test_operands_of_the_tokens_type(kernels: Kernels, tokens: int, dtype: str) -> None:
    check(kernels, replace(LAYER, has_shared_gate=True), tokens, dtype, scale_dtype=dtype, router_dtype=dtype)


@pytest.mark.parametrize("tokens", (1000, 5000))
@pytest.mark.parametrize("weights", ("int4:128", "float8:128x128", "plain"))
def test_prompts(kernels: Kernels, weights: str, tokens: int) -> None:
    check(kernels, replace(CONFIGS[weights], num_experts=8, n_group=4, topk_group=2, top_k=2), tokens, "bfloat16")


def test_small_scales_of_float16(kernels: Kernels) -> None:
    """Scales below float16's normal numbers, with tokens as much larger."""
    inputs = draw_inputs(LAYER, 40, np.random.default_rng(1), "normal", "float16")
    inputs["x"] = (inputs["x"] * np.float16(1000)).astype(np.float16)
    for name in ("gate_up_scale", "shared_gate_up_scale", "router_weight"):
        inputs[name] = inputs[name] * np.float32(1e-3)
    want = reference(LAYER, inputs)["y"]
    for tokens in (40, 3):
        few = {name: x[:tokens] if name == "x" else x for name, x in inputs.items()}
        error = relative_error(kernels.run(LAYER, few)["y"], want[:tokens])
        assert error <= tolerance("cuda", "float16"), f"{tokens} tokens: {error:.2e}"


def test_repeats_give_equal_bits(kernels: Kernels) -> None:
    for tokens in (1, 8, 200):
        inputs = draw_inputs(LAYER, tokens, np.random.default_rng(5), "normal", "bfloat16")
        first = kernels.run(LAYER, inputs)["y"]
        for _ in range(3):
            np.testing.assert_array_equal(kernels.run(LAYER, inputs)["y"], first)


def test_no_tokens(kernels: Kernels) -> None:
    inputs = draw_inputs(LAYER, 3, np.random.default_rng(5), "normal", "bfloat16")
    call = Call(LAYER, {name: to_torch(x[:0] if name == "x" else x, "cuda") for name, x in inputs.items()})
    layer = kernels.layer(call)
    kernels.prepare(call, layer)
    kernels.launch(call, layer)
    torch.cuda.synchronize()
    layer.close()


def test_one_layer_for_calls_of_many_sizes(kernels: Kernels) -> None:
    """A layer, then calls without weights, small ones after large ones and the other way round."""
    inputs = draw_inputs(LAYER, 300, np.random.default_rng(2), "normal", "bfloat16")
    want = reference(LAYER, inputs)["y"]
    tensors = {name: to_torch(x, "cuda") for name, x in inputs.items()}
    layer = kernels.layer(Call(LAYER, tensors))
    torch.cuda.synchronize()
    weights = [name for name in tensors if name.endswith(("up_weight", "down_weight", "_scale"))]
    kept = {name: x for name, x in tensors.items() if name not in weights}
    for tokens in (1, 300, 16, 33, 2):
        call = kernels.prepare(Call(LAYER, {**kept, "x": tensors["x"][:tokens].clone()}), layer)
        kernels.launch(call, layer)
        torch.cuda.synchronize()
        assert relative_error(call.outputs["y"].double().cpu().numpy(), want[:tokens]) <= tolerance("cuda", "bfloat16")
    layer.close()


@pytest.mark.parametrize("tokens", (1, 8, 200))
def test_graph_capture(kernels: Kernels, tokens: int) -> None:
    inputs = draw_inputs(LAYER, tokens, np.random.default_rng(2), "normal", "bfloat16")
    call = Call(LAYER, {name: to_torch(x, "cuda") for name, x in inputs.items()})
    layer = kernels.layer(call)
    kernels.prepare(call, layer)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        kernels.launch(call, layer, stream.cuda_stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        kernels.launch(call, layer, stream.cuda_stream)
    again = draw_inputs(LAYER, tokens, np.random.default_rng(3), "normal", "bfloat16")
    call.tensors["x"].copy_(to_torch(again["x"], "cuda"))
    for _ in range(3):
        call.outputs["y"].fill_(float("nan"))
        graph.replay()
    torch.cuda.synchronize()
    want = reference(LAYER, {**inputs, "x": again["x"]})["y"]
    assert relative_error(call.outputs["y"].double().cpu().numpy(), want) <= tolerance("cuda", "bfloat16")
    layer.close()


def test_refusals(kernels: Kernels) -> None:
    inputs = draw_inputs(LAYER, 1, np.random.default_rng(5), "normal", "bfloat16")
    tensors = {name: to_torch(x, "cuda") for name, x in inputs.items()}
    assert kernels.refusal(Call(LAYER, tensors).params) is None
    for field, value, said in (
        ("num_experts", 4096, "kernels take up to 1024"),
        ("top_k", 33, "num_experts 32"),
        ("n_group", 5, "n_group 5"),
        ("group_top", 5, "group_top 5"),
        ("hidden_size", 0, "must be 1 or more"),
        ("dtype", 9, "element type 9"),
        ("activation", 7, "activation 7"),
    ):
        call = Call(LAYER, tensors)
        setattr(call.params, field, value)
        reason = kernels.refusal(call.params)
        assert reason is not None
        assert said in reason or "top_k" in reason, reason
    assert "8.0" in (kernels.refusal(Call(LAYER, tensors).params, 75) or "")
    bad = Call(LAYER, tensors)
    bad.params.gate_up.scale = None
    with pytest.raises(RuntimeError, match="gate_up_scale is required"):
        kernels.layer(bad)


def test_a_layer_is_packed_matrix_by_matrix(kernels: Kernels) -> None:
    inputs = draw_inputs(LAYER, 5, np.random.default_rng(5), "normal", "bfloat16")
    tensors = {name: to_torch(x, "cuda") for name, x in inputs.items()}
    names = ("gate_up", "down", "shared_gate_up", "shared_down")
    empty = Call(LAYER, tensors)
    for name in names:
        getattr(empty.params, name).data = None
    layer = kernels.layer(empty)
    kernels.prepare(empty, layer)
    with pytest.raises(RuntimeError, match="weights are missing"):
        kernels.launch(empty, layer)
    for name in names:
        one = Call(LAYER, tensors)
        for other in names:
            if other != name:
                getattr(one.params, other).data = None
        kernels.check(kernels.face("pack")(layer.handle, ctypes.byref(one.params), 0))
    kernels.launch(empty, layer)
    torch.cuda.synchronize()
    want = reference(LAYER, inputs)["y"]
    assert relative_error(empty.outputs["y"].double().cpu().numpy(), want) <= tolerance("cuda", "bfloat16")
    layer.close()
