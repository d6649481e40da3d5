"""Configurations that between them use every part of the op."""

from __future__ import annotations

from dataclasses import replace

from deltafuse.custom_ops.moe.spec import MoeConfig

#: Everything at once, small and odd.
FULL = MoeConfig(
    num_experts=16,
    top_k=4,
    hidden_size=24,
    intermediate_size=10,
    shared_intermediate_size=6,
    n_group=4,
    topk_group=2,
    norm_eps=1e-20,
    routed_scaling_factor=2.5,
    clamp="before",
    gate_limit=2.0,
    up_limit=1.5,
    block_size=16,
    shared_block_size=8,
    weight_format="int4",
    shared_format="int8",
    has_router_bias=True,
    has_expert_bias=True,
    has_shared_gate=True,
    has_ids=True,
)

CONFIGS: dict[str, MoeConfig] = {
    "full": FULL,
    "bare": MoeConfig(8, 2, 12, 6, score_function="softmax"),
    "max-group": MoeConfig(
        12, 3, 16, 8, n_group=3, topk_group=2, group_top=1, masked_score="0", masked_weights=1, norm_topk_prob=0,
        score_function="softmax", routed_scaling_factor=16.0, has_ids=True,
    ),
    "few-in-groups": MoeConfig(  # more experts are chosen than the groups that stay have
        12, 5, 8, 4, n_group=6, topk_group=2, has_expert_bias=True, masked_weights=1, has_ids=True, norm_eps=1e-6
    ),
    "logits": MoeConfig(10, 3, 8, 4, 4, has_router_weight=False, has_expert_bias=True, activation="gelu", has_ids=True),
    "one-expert": MoeConfig(1, 1, 8, 6, group_top=1, activation="gelu_tanh", has_ids=True),
    "not-gated": replace(
        FULL, gated=0, activation="relu2", clamp="none", weight_format="uint4", has_zero_point=True, block_size=6,
        shared_format="int4", shared_has_zero_point=True, shared_block_size=0,
    ),
    "clamp-after": replace(
        FULL, clamp="after", gate_limit=0.5, weight_format="uint8", has_zero_point=True, block_size=0,
        shared_format="uint8", shared_has_zero_point=True, shared_block_size=4,
    ),
    "int8-rows": MoeConfig(
        8, 2, 16, 8, weight_format="int8", has_expert_bias=True, score_function="softmax", norm_eps=1e-9, has_ids=True
    ),
    "float8": replace(
        FULL, hidden_size=40, intermediate_size=20, weight_format="float8", block_size=16, block_rows=8,
        shared_format="float8", shared_block_size=16, shared_block_rows=4, clamp="none",
    ),
    "bfloat16-weights": replace(
        FULL, weight_format="bfloat16", shared_format="float", block_size=0, shared_block_size=0, group_top=3,
        has_shared_gate=False, norm_topk_prob=0,
    ),
    "zero-experts": MoeConfig(  # LongCat-Flash's
        12, 4, 16, 8, zero_experts=4, score_function="softmax", has_expert_bias=True, norm_topk_prob=0,
        routed_scaling_factor=6.0, has_ids=True,
    ),
    "zero-experts-shared": replace(FULL, zero_experts=5, norm_min=0.4),
    "clamped-norm": MoeConfig(  # Ernie 4.5's
        12, 3, 16, 8, 6, score_function="softmax", has_expert_bias=True, norm_min=0.5, has_ids=True
    ),
    "by-logits": replace(FULL, choose_by_logits=1),
    "biases": MoeConfig(  # gpt-oss's
        8, 3, 16, 10, score_function="softmax", has_router_bias=True, activation_alpha=1.702, up_offset=1.0,
        clamp="before", gate_limit=1.5, up_limit=1.0, has_gate_up_bias=True, has_down_bias=True, has_ids=True,
    ),
    "biases-int4": replace(
        FULL, has_gate_up_bias=True, has_down_bias=True, has_shared_gate_up_bias=True, has_shared_down_bias=True,
        activation_alpha=0.5, up_offset=-0.5, zero_experts=3, clamp="after",
    ),
    "biases-not-gated": replace(
        FULL, gated=0, clamp="none", activation_alpha=2.0, has_gate_up_bias=True, has_shared_down_bias=True
    ),
    "int4-128": MoeConfig(
        32, 8, 256, 128, 128, n_group=8, topk_group=4, norm_eps=1e-20, routed_scaling_factor=2.5, block_size=128,
        weight_format="int4", shared_format="int4", shared_block_size=128, has_expert_bias=True, has_ids=True,
    ),
}  # fmt: skip
