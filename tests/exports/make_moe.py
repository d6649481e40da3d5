"""Exports of hand-written mixtures of experts, each in a style of its own (``moe_side``).

Usage: ``python -m exports.make_moe [NAME ...]`` with torch; no names means all.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.export import Dim

from .moe_parts import D, coarse
from .moe_quantized import gathered, quantized
from .moe_side import Behind, Block, HalfRouter, Hashed, Layers, NormedRouter, SpreadLogits, TopOne
from .pack import lean
from .torch_side import export, fill

S, B = Dim("S", min=2, max=256), Dim("B", min=2, max=16)
BEFORE, AFTER = ("before", 0.4), ("after", 0.25)

#: name -> (style, what Block takes). Every style once with the default router, then routers and experts that differ.
BLOCKS: dict[str, tuple[str, dict[str, Any]]] = {
    "moe_dense": ("dense", {}),
    "moe_dense_select": ("dense_select", {"shared": "none"}),
    "moe_dense_eq": ("dense_eq", {}),
    "moe_dense_where": ("dense_where", {}),
    "moe_dense_onehot": ("dense_onehot", {}),
    "moe_stacked": ("stacked", {}),
    "moe_stacked_matmul": ("stacked_matmul", {}),
    "moe_gather": ("gather", {}),
    "moe_gather_joined": ("gather_matmul", {"mlp": {"form": "joined"}}),
    "moe_gather_interleaved": ("gather_matmul", {"mlp": {"form": "interleaved"}}),
    "moe_where": ("where", {}),
    "moe_where_rows": ("where_rows", {}),
    "moe_where_put": ("where_put", {}),
    "moe_scatter_pairs": ("scatter_pairs", {}),
    "moe_dense_pairs": ("dense_pairs", {}),
    "moe_onehot_mask": ("gather", {"router": {"style": "onehot"}}),
    "moe_compare_mask": ("dense", {"router": {"style": "compare"}}),
    "moe_view_mask": ("stacked", {"router": {"style": "view"}}),
    "moe_zero_mask": ("gather", {"router": {"fill": 0.0}}),
    "moe_product_mask": ("stacked", {"router": {"style": "product", "fill": 0.0}}),
    "moe_added_mask": ("stacked", {"router": {"style": "added"}}),
    "moe_masked_weights": (
        "gather",
        {"router": {"score": "softmax", "bias": False, "best": "max", "fill": 0.0, "picked": "values", "norm": False}},
    ),
    "moe_softmax_no_groups": ("stacked", {"router": {"score": "softmax", "bias": False, "groups": (1, 1)}}),
    "moe_values_no_groups": (
        "gather",
        {"router": {"bias": False, "groups": (1, 1), "picked": "values", "scale": 1.0}, "shared": "none"},
    ),
    "moe_unnormalised": ("dense", {"router": {"norm": False}, "shared": "gated"}),
    "moe_eps": ("stacked", {"router": {"eps": 0.05}}),
    "moe_linear_bias": ("gather", {"router": {"linear_bias": True}}),
    "moe_gelu": ("stacked", {"mlp": {"act": "gelu"}}),
    "moe_gelu_tanh": ("dense", {"mlp": {"act": "gelu_tanh"}}),
    "moe_relu2_plain": ("dense_eq", {"mlp": {"act": "relu2", "form": "plain"}}),
    "moe_clamp_before": ("gather", {"mlp": {"clamp": BEFORE}}),
    "moe_clamp_after": ("dense", {"mlp": {"clamp": AFTER}}),
    "moe_few_kept": ("gather", {"router": {"groups": (4, 1)}}),
    "moe_few_kept_zero": ("stacked", {"router": {"groups": (4, 1), "fill": 0.0}}),
    "moe_masked_few": (
        "gather",
        {"router": {"bias": False, "groups": (4, 1), "fill": 0.0, "picked": "values", "scale": 1.5}},
    ),
    "moe_gather_turned": ("gather_turned", {}),
    "moe_gather_three": ("gather_three", {"router": {"fill": -1e9, "norm": "l1"}}),
    "moe_gather_row": ("gather_row", {"mlp": {"act": "relu2_bounded"}}),
    "moe_picked": ("picked", {}),
    "moe_picked_stacked": ("picked_stacked", {}),
    "moe_any_choice": ("any_choice", {}),
    "moe_any_mask": ("any_mask", {}),
    "moe_by_choice": ("by_choice", {}),
    "moe_added_rows": ("added_rows", {}),
    "moe_einsum_onehot": ("einsum_onehot", {"shared": "none"}),
    "moe_mask_pairs": ("mask_pairs", {}),
    "moe_scaled_norm": ("gather", {"router": {"norm": "scaled"}}),
    "moe_shared_norm": ("stacked", {"router": {"norm": "share"}}),
    "moe_where_column": ("where_column", {}),
    "moe_where_inside": ("where_inside", {}),
    "moe_dense_inside": ("dense_inside", {}),
    "moe_stacked_inside": ("stacked_inside", {}),
    "moe_indexed_scores": ("gather", {"router": {"picked": "indexed"}}),
    "moe_norm_least": ("gather", {"router": {"eps": 0.1, "least": 1.7}}),
    "moe_zero_experts": ("zero_experts", {}),
    "moe_zero_loop": ("zero_loop", {}),
    "moe_zero_turns": (
        "zero_turns",
        {"shared": "none", "router": {"score": "softmax", "norm": False, "scale": 6.0, "groups": (1, 1)}},
    ),
    "moe_zero_pairs": ("zero_pairs", {}),
    "moe_zero_stacked": ("zero_stacked", {"shared": "none"}),
    "moe_zero_gather": ("zero_gather", {}),
    "moe_zero_choices": ("zero_choices", {}),
    "moe_biased_experts": ("dense", {"mlp": {"bias": True}}),
    "moe_biased_where": ("where", {"mlp": {"bias": True, "clamp": BEFORE}}),
    "moe_biased_pairs": ("dense_pairs", {"mlp": {"bias": True}}),
    "moe_biased_gather": ("gather_biased", {"mlp": {"bias": True}}),
    "moe_biased_stacked": ("stacked_biased", {"mlp": {"bias": True}, "shared": "none"}),
    "moe_routing_shown": ("gather", {"shown": True}),
    "moe_dense_interleaved": ("where_rows", {"mlp": {"form": "interleaved"}}),
    "moe_dense_joined": ("dense_onehot", {"mlp": {"form": "joined"}, "shared": "gated"}),
}


def block(name: str) -> None:
    style, settings = BLOCKS[name]
    module = coarse(fill(Block(style, **settings)))
    x = torch.randn(1, 6, D, generator=torch.Generator().manual_seed(3))
    export(
        module,
        (x,),
        name,
        dynamic=({1: S},),
        after=lean,
        names=(["x"], ["y", "ids", "weights"] if settings.get("shown") else ["y"]),
        made=f"torch.onnx.export of a hand-written MoE, {style}",
        kda=0,
        moe=1,
        bindings=[{"S": 3}, {"S": 17}],
        tags=("moe", "hand-written"),
    )


def half(name: str, dtype: torch.dtype, opset: int, **settings: Any) -> None:
    """A half-precision model with a float32 router."""
    module = coarse(fill(Block(settings.pop("style", "gather"), **settings))).to(dtype)
    for part in (module.gate.weight, module.gate.e_score_correction_bias):
        part.data = part.data.float()
    x = torch.randn(1, 5, D, generator=torch.Generator().manual_seed(3)).to(dtype)
    export(
        module,
        (x,),
        name,
        dynamic=({1: S},),
        names=(["x"], ["y"]),
        opset=opset,
        after=lean,
        made=f"torch.onnx.export of a hand-written MoE, {dtype}, router in float32",
        kda=0,
        moe=1,
        bindings=[{"S": 3}, {"S": 17}],
        tolerance=5e-3,
        loads=dtype == torch.float16,
        tags=("moe", "hand-written"),
    )


def variants(wanted: list[str]) -> None:
    """One style each with an older and a newer opset, without the optimiser, frozen, two sequences, two axes."""
    x = torch.randn(1, 6, D, generator=torch.Generator().manual_seed(3))
    common: dict[str, Any] = dict(names=(["x"], ["y"]), after=lean, kda=0, moe=1, tags=("moe", "hand-written"))
    older: dict[str, Any] = dict(legacy=True, opset=18, dynamic={"x": {1: "S"}}, bindings=[{"S": 3}, {"S": 17}])
    steps: dict[str, Any] = {
        "moe_where_op18": ("where", (x,), dict(dynamic=({1: S},), opset=18, bindings=[{"S": 3}, {"S": 17}])),
        "moe_stacked_noopt": ("stacked", (x,), dict(dynamic=({1: S},), optimize=False, bindings=[{"S": 3}, {"S": 17}])),
        "moe_where_noopt": (
            "where_rows",
            (x,),
            dict(dynamic=({1: S},), optimize=False, bindings=[{"S": 3}, {"S": 17}]),
        ),
        "moe_gather_op24": ("gather", (x,), dict(dynamic=({1: S},), opset=24, bindings=[{"S": 3}, {"S": 17}])),
        "moe_dense_frozen": ("dense", (x,), {}),
        "moe_gather_one_token": ("gather", (x[:, :1],), {}),
        "moe_where_batch2": ("where_rows", (x.repeat(2, 1, 1),), {}),
        "moe_gather_rows": ("gather", (x[0],), dict(dynamic=({0: S},), bindings=[{"S": 3}, {"S": 17}])),
        "moe_gather_dynbatch": (
            "gather",
            (x.repeat(2, 1, 1),),
            dict(dynamic=({0: B, 1: S},), bindings=[{"B": 2, "S": 3}, {"B": 5, "S": 7}]),
        ),
        "moe_legacy_stacked": ("stacked", (x,), dict(legacy=True, opset=18)),
        "moe_legacy_gather": ("gather", (x,), dict(legacy=True, opset=18)),
        "moe_legacy_where": ("where", (x,), dict(legacy=True, opset=18)),
        "moe_legacy_rows": ("where_rows", (x,), older),
        "moe_legacy_none": ("where_none", (x,), older),
        "moe_legacy_scatter_add": ("scatter_add", (x,), older),
        "moe_legacy_addcmul": ("dense_addcmul", (x,), older),
    }
    for name, (style, args, more) in steps.items():
        if not wanted or name in wanted:
            export(
                coarse(fill(Block(style))),
                args,
                name,
                made=f"torch.onnx.export of a hand-written MoE, {style}",
                **common,
                **more,
            )


#: name -> (style, what `quantized` takes).
QUANTIZED: dict[str, tuple[str, dict[str, Any]]] = {
    "moe_int4_gather": ("gather", {"kind": "int4", "block": 8}),
    "moe_uint4_stacked": ("stacked", {"kind": "uint4", "block": 8, "zero_point": True}),
    "moe_int8_gathered": ("gather", {"kind": "int8", "block": 8}),
    "moe_int8_where": ("where", {"kind": "int8"}),
    "moe_uint8_dense": ("dense", {"kind": "uint8", "zero_point": True}),
    "moe_int4_dense": ("dense", {"kind": "int4", "block": 8}),
    "moe_float8_stacked_matmul": ("stacked_matmul", {"kind": "float8", "block": 8}),
    "moe_int8_tensor_stacked": ("stacked", {"kind": "int8", "per": "tensor"}),
}


def already_quantized(name: str) -> None:
    style, settings = QUANTIZED[name]
    step = gathered if name == "moe_int8_gathered" else quantized
    x = torch.randn(1, 6, D, generator=torch.Generator().manual_seed(3))
    export(
        coarse(fill(Block(style))),
        (x,),
        name,
        dynamic=({1: S},),
        names=(["x"], ["y"]),
        opset=21,
        after=lambda model: lean(step(**settings)(model)),
        made=f"a hand-written MoE, {style}, its experts quantized as DequantizeLinear: {settings}",
        kda=0,
        moe=1,
        bindings=[{"S": 3}, {"S": 17}],
        tags=("moe", "hand-written", *(["quantized"] if step is quantized else [])),
    )


def others(wanted: list[str]) -> None:
    """Two layers in one graph, a router in 16 bits, and blocks that are refused: moe=0."""
    x = torch.randn(1, 6, D, generator=torch.Generator().manual_seed(3))
    refused = ("moe", "refused")
    steps: dict[str, Any] = {
        "moe_spread_logits": (SpreadLogits(), (x,), dict(moe=1, tags=("moe", "hand-written"))),
        "moe_two_layers": (Layers(), (x,), dict(moe=2, tags=("moe", "hand-written"))),
        "moe_top_one": (TopOne(), (x,), dict(moe=1, tags=("moe", "hand-written"))),
        "moe_behind": (Behind("where"), (x,), dict(moe=1, tags=("moe", "hand-written"))),
        "moe_legacy_normed_router": (
            NormedRouter(),
            (x,),
            dict(moe=1, tags=("moe", "hand-written"), legacy=True, opset=18, dynamic={"x": {1: "S"}}),
        ),
        "moe_half_logits": (HalfRouter(False).half(), (x.half(),), dict(moe=1, tags=("moe",), tolerance=5e-3)),
        "moe_half_scores": (HalfRouter(True).half(), (x.half(),), dict(moe=0, tags=refused, tolerance=5e-3)),
    }
    for name, (module, args, more) in steps.items():
        if not wanted or name in wanted:
            export(
                coarse(fill(module)),
                args,
                name,
                dynamic=more.pop("dynamic", ({1: S},)),
                names=(["x"], ["y"]),
                made=f"torch.onnx.export of a hand-written MoE: {name.removeprefix('moe_').replace('_', ' ')}",
                kda=0,
                after=lean,
                bindings=[{"S": 3}, {"S": 17}],
                **more,
            )
    if not wanted or "moe_hashed" in wanted:
        tokens = torch.randint(0, 60, (1, 6), generator=torch.Generator().manual_seed(4))
        export(
            coarse(fill(Hashed())),
            (x, tokens),
            "moe_hashed",
            dynamic=({1: S}, {1: S}),
            names=(["x", "tokens"], ["y"]),
            made="torch.onnx.export of a hand-written MoE: experts by a table over token ids",
            kda=0,
            moe=0,
            after=lean,
            bindings=[{"S": 3}, {"S": 17}],
            tags=refused,
        )


if __name__ == "__main__":
    chosen = sys.argv[1:]
    for each in BLOCKS:
        if not chosen or each in chosen:
            block(each)
    if not chosen or "moe_f16" in chosen:
        half("moe_f16", torch.float16, 20)
    if not chosen or "moe_bf16" in chosen:
        half("moe_bf16", torch.bfloat16, 20, style="stacked")
    variants(chosen)
    others(chosen)
    for each in QUANTIZED:
        if not chosen or each in chosen:
            already_quantized(each)
