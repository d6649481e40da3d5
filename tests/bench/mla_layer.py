"""The latent attention that is measured: heads, ranks and widths of DeepSeek-V3 and Ling, over a latent cache."""

from __future__ import annotations

from typing import Any

#: Fields of `MlaConfig`; the class itself is imported in other ways where there is a GPU and no installed package.
FIELDS: dict[str, Any] = {
    "num_heads": 32,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "kv_lora_rank": 512,
    "scale": 192**-0.5,
    "rope": "half",
    "gate_activation": "sigmoid",
    "cache": "latent",
    "has_kv_norm": True,
    "cos_width": 64,
    "has_past": True,
    "has_present": True,
}
