"""Configurations that between them use every part of the op."""

from __future__ import annotations

from dataclasses import replace

from deltafuse.custom_ops.mla.spec import MlaConfig

#: Everything at once, small and odd.
FULL = MlaConfig(
    num_heads=3,
    qk_nope_head_dim=5,
    qk_rope_head_dim=4,
    v_head_dim=6,
    kv_lora_rank=10,
    scale=0.3,
    rope="half",
    gate_activation="sigmoid",
    cache="latent",
    has_kv_norm=True,
    has_position_ids=True,
    cos_width=4,
    has_q_scale=True,
    has_past=True,
    has_mask=True,
    has_present=True,
)
BARE = MlaConfig(2, 8, 0, 8, 16, 0.35)
STATIC = replace(FULL, static_cache=True)

CONFIGS: dict[str, MlaConfig] = {
    "full": FULL,
    "bare": BARE,
    "bare-all-see-all": replace(BARE, causal=0),
    "nope-with-rope-part": replace(FULL, rope="none", cos_width=0, has_position_ids=False, packed_latent=True),
    "fresh-latent": replace(FULL, has_past=False, rope="interleaved", has_position_ids=False),
    "fresh-expanded": replace(FULL, has_past=False, rope="deinterleaved", cos_width=2, cache="expanded"),
    "no-cache": replace(FULL, cache="none", has_past=False, has_present=False, rope="interleaved", cos_width=2),
    "expanded": replace(FULL, cache="expanded", has_kv_norm=False, rope="deinterleaved"),
    "expanded-static": replace(STATIC, cache="expanded", rope="half", cos_width=2, bool_mask=True),
    "packed-cache": replace(FULL, packed_cache=True, packed_latent=True, has_mask=False),
    "window": replace(FULL, window=3, bool_mask=True),
    "static": STATIC,
    "static-window": replace(STATIC, window=2, has_mask=False, packed_cache=True),
    "static-all-see-all": replace(STATIC, causal=0, has_mask=False),
    "static-unwritten": replace(STATIC, has_present=False),
    "paged": replace(STATIC, paged=True, bool_mask=True),
    "paged-packed": replace(STATIC, paged=True, packed_cache=True, has_mask=False, has_q_scale=False),
    "paged-no-rope": replace(BARE, cache="latent", has_past=True, has_present=True, static_cache=True, paged=True),
    "int8": replace(FULL, cache_type="int8"),
    "int8-static": replace(STATIC, cache_type="int8", has_mask=False),
    "int8-paged": replace(STATIC, cache_type="int8", paged=True),
    "float8": replace(FULL, cache_type="float8", kv_lora_rank=130),
    "float8-static": replace(STATIC, cache_type="float8", kv_lora_rank=130, has_kv_norm=False),
    "float8-paged": replace(STATIC, cache_type="float8", paged=True, has_mask=False),
    "heads-128": MlaConfig(
        num_heads=2,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        kv_lora_rank=512,
        scale=192**-0.5,
        rope="half",
        cos_width=64,
        cache="latent",
        has_past=True,
        has_present=True,
    ),
}
