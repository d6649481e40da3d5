"""Configurations that between them use every part of the op."""

from __future__ import annotations

from dataclasses import replace

from deltafuse.custom_ops.kda.spec import KdaConfig

#: Everything at once, small and odd.
FULL = KdaConfig(
    num_heads=2,
    num_v_heads=4,
    head_dim=6,
    head_v_dim=5,
    scale=0.4,
    qk_l2norm="sum",
    gate_activation="sigmoid",
    beta_activation="sigmoid",
    conv_activation="silu",
    output_gate="sigmoid",
    conv_width=4,
    conv_state_width=3,
    has_dt_bias=True,
    has_conv_bias=True,
    has_conv_state=True,
    has_initial_state=True,
    has_norm=True,
    has_present_conv_state=True,
    has_final_state=True,
)

CONFIGS: dict[str, KdaConfig] = {
    "full": FULL,
    "ragged": replace(FULL, has_cu_seqlens=True),
    "ragged-bare": KdaConfig(1, 2, 5, 7, 0.5, has_cu_seqlens=True, has_final_state=True),
    "wide-conv-state": replace(
        FULL,
        conv_state_width=4,
        state_layout="VK",
        gate_activation="softplus",
        output_gate="silu",
        qk_l2norm="max",
        l2norm_eps=1e-12,
        beta_scale=2.0,
        packed_qkv=True,
    ),
    "bare": KdaConfig(3, 3, 5, 7, 0.3),
    "state-only": KdaConfig(1, 3, 8, 4, 0.3, state_layout="VK", has_final_state=True, gate_activation="softplus"),
    "fresh-conv": replace(
        FULL, has_conv_state=False, has_initial_state=False, has_conv_bias=False, conv_width=3, conv_state_width=2
    ),
    "conv-without-states": replace(
        FULL,
        conv_state_width=0,
        has_conv_state=False,
        has_present_conv_state=False,
        conv_width=1,
        conv_activation="none",
        qk_l2norm="none",
    ),
    "dt-bias-alone": KdaConfig(2, 2, 16, 16, 0.25, has_dt_bias=True, has_initial_state=True, has_norm=True),
    "head-128": KdaConfig(
        1,
        1,
        128,
        128,
        128**-0.5,
        qk_l2norm="sum",
        gate_activation="sigmoid",
        has_initial_state=True,
        has_final_state=True,
    ),
}
