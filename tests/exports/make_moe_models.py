"""Exports of the mixtures of experts of transformers' models, each block alone with its router and shared expert.

Usage: ``python -m exports.make_moe_models [NAME ...]`` with torch and transformers; no names means all.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import torch
from torch.export import Dim

from .moe_parts import coarse
from .pack import lean
from .torch_side import export, fill

S = Dim("S", min=2, max=256)
SMALL: dict[str, Any] = dict(
    hidden_size=24,
    intermediate_size=16,
    moe_intermediate_size=8,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    num_local_experts=8,
    num_experts=8,
    n_routed_experts=8,
    n_shared_experts=1,
    num_shared_experts=1,
    num_experts_per_tok=3,
    n_group=4,
    topk_group=2,
    norm_topk_prob=True,
    routed_scaling_factor=2.5,
    shared_expert_intermediate_size=16,
    moe_shared_expert_intermediate_size=16,
    vocab_size=64,
    pad_token_id=0,
)
#: name -> (model's folder, block's class, configuration's class, changes)
MODELS: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "bailing": ("bailing_hybrid", "BailingHybridMoE", "BailingHybridConfig", {}),
    "kimi": ("kimi_linear", "KimiLinearMoE", "KimiLinearConfig", {}),
    "deepseek_v2": ("deepseek_v2", "DeepseekV2Moe", "DeepseekV2Config", {"topk_method": "group_limited_greedy"}),
    "deepseek_v2_greedy": ("deepseek_v2", "DeepseekV2Moe", "DeepseekV2Config", {"topk_method": "greedy"}),
    "deepseek_v3": ("deepseek_v3", "DeepseekV3MoE", "DeepseekV3Config", {"norm_topk_prob": False}),
    "glm4": ("glm4_moe", "Glm4MoeMoE", "Glm4MoeConfig", {}),
    "dots1": ("dots1", "Dots1MoE", "Dots1Config", {}),
    "exaone": ("exaone_moe", "ExaoneMoeSparseMoEBlock", "ExaoneMoeConfig", {}),
    "nemotron": ("nemotron_h", "NemotronHMoE", "NemotronHConfig", {"mlp_hidden_act": "relu2", "mlp_bias": False}),
    "nemotron_latent": (
        "nemotron_h",
        "NemotronHMoE",
        "NemotronHConfig",
        {"moe_latent_size": 16, "mlp_hidden_act": "relu2", "mlp_bias": False},
    ),
    "mistral4": ("mistral4", "Mistral4MoE", "Mistral4Config", {}),
    "mimo": ("mimo_v2_flash", "MiMoV2FlashMoE", "MiMoV2FlashConfig", {}),
    "minimax_m2": ("minimax_m2", "MiniMaxM2SparseMoeBlock", "MiniMaxM2Config", {}),
    "qwen3_next": ("qwen3_next", "Qwen3NextSparseMoeBlock", "Qwen3NextConfig", {}),
    "ernie": ("ernie4_5_moe", "Ernie4_5_MoeSparseMoeBlock", "Ernie4_5_MoeConfig", {}),
    "lfm2": ("lfm2_moe", "Lfm2MoeSparseMoeBlock", "Lfm2MoeConfig", {}),
    "afmoe": ("afmoe", "AfmoeSparseMoeBlock", "AfmoeConfig", {}),
    "gpt_oss": ("gpt_oss", "GptOssMLP", "GptOssConfig", {"intermediate_size": 8, "swiglu_limit": 1.0}),
    "granite": ("granitemoe", "GraniteMoeMoE", "GraniteMoeConfig", {}),
    "cohere2": ("cohere2_moe", "Cohere2MoeSparseMoeBlock", "Cohere2MoeConfig", {"expert_selection_fn": "sigmoid"}),
    "kolibri1": ("kolibri1", "Kolibri1SparseMoeBlock", "Kolibri1Config", {}),
    "hy_v4": ("hy_v4", "HYV4MoE", "HYV4Config", {}),
    "mixtral": ("mixtral", "MixtralSparseMoeBlock", "MixtralConfig", {}),
}


#: Exported by the older exporter besides.
LEGACY = ("gpt_oss", "deepseek_v3")


class Alone(torch.nn.Module):
    """The block, hidden states in and out."""

    def __init__(self, block: torch.nn.Module) -> None:
        super().__init__()
        self.mlp = block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.mlp(x)
        return out[0] if isinstance(out, tuple) else out


def make(name: str, experts: str = "batched_mm", moe: int = 1, *, legacy: bool = False, **more: Any) -> None:
    folder, block, configuration, changes = MODELS[name]
    package = f"transformers.models.{folder}"
    config_class = getattr(importlib.import_module(f"{package}.configuration_{folder}"), configuration)
    module = getattr(importlib.import_module(f"{package}.modeling_{folder}"), block)
    try:
        config = config_class(**{**SMALL, **changes})
        config._experts_implementation = experts
        built = coarse(fill(Alone(module(config))))
    except Exception as reason:
        print(f"moe_{name}: not built: {type(reason).__name__}: {reason}", flush=True)
        return
    x = torch.randn(1, 6, 24, generator=torch.Generator().manual_seed(3))
    export(
        built,
        (x,),
        f"moe_{'legacy_' if legacy else ''}{name}",
        dynamic={"x": {1: "S"}} if legacy else ({1: S},),
        legacy=legacy,
        opset=18 if legacy else None,
        names=(["x"], ["y"]),
        made=f"torch.onnx.export of {block}, experts {experts}",
        kda=0,
        after=lean,
        moe=moe,
        bindings=[{"S": 3}, {"S": 17}],
        **more,
    )


if __name__ == "__main__":
    for each in sys.argv[1:] or [*MODELS, *(f"legacy_{name}" for name in LEGACY)]:
        kind = each.removeprefix("legacy_")
        make(kind, legacy=kind != each, tags=("moe", "transformers"))
