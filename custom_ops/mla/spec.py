"""The op ``deltafuse::LatentAttention``, version 1: inputs, outputs, attributes, shapes, limits, tolerances.

Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434) keeps one latent ``c`` of width R = kv_lora_rank and one
rotary key of width Dr = qk_rope_head_dim for every token, shared by all heads. For head h of width
Dn = qk_nope_head_dim, values of width Dv = v_head_dim, query i and key j::

    k_j = [c_j W_uk[h] | rope(k_rope_j)]       v_j = c_j W_uv[h]       q_i = [q_nope_i | rope(q_rope_i)]
    s_ij = scale * q_scale_i * q_i . k_j + mask_ij
    o_i = sum_j softmax_j(s_ij) v_j

Everything around that is optional and is done in this order:

1. ``kv_norm_weight``: RMS norm of the latent (not of the rotary key), times the weight. The cache holds what follows.
2. ``rope``: rotation of the queries' and keys' last Dr channels by ``cos`` and ``sin``. The cache holds rotated keys.
   With W = Dr a channel's cosine and sine are those at the place it is written to, with W = Dr / 2 those of its pair.
3. the cache: the new tokens are appended to, or written into, what is there: at P (growing) or ``cache_lengths[b]``.
4. the attention, over the whole cache. A key's position is its place in the cache, a new token's query has the position
   of its key; ``position_ids`` are for the rotation alone.
5. ``gate``: times sigmoid of one number a token and head.

A query whose every key is masked out (minus infinity or False) gives zeros. Entries of a cache beyond its length are
never read as numbers: they may be NaN. ``window`` counts the query's own key: 1 is that alone.

8-bit caches hold the latent as codes, nearest, ties to even; new tokens are attended to as they were written. int8:
``code * scale[channel]``, codes -127 to 127. float8: ``code * scale[token, channel // 128]``; a new token's scale is
the largest magnitude of the group over 448, in float32 (1 where the group is all zeros). See ``quantize.py``.

Wrong values are errors, found before anything is written: a position outside of the tables, a length below 0 or with
``cache_lengths[b] + S`` above the capacity, a block id outside of the pool among the first
``ceil((cache_lengths[b] + S) / block_size)`` of a row. Later entries of ``block_table`` are not looked at. Rows may
share blocks of tokens that are there already (a common prefix), but not a block that one of them writes into.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from typing import Any

from ..common.refusal import Refusal

DOMAIN = "deltafuse"
OP_TYPE = "LatentAttention"
VERSION = 1

#: Formal inputs in order. T: float32, float16 or bfloat16, one for all of them. B batch, S new tokens, H num_heads,
#: Dn qk_nope_head_dim, Dr qk_rope_head_dim, Dv v_head_dim, R kv_lora_rank, P tokens in a growing cache or the capacity
#: of a static one, L keys: P + S (growing), P (static), max_blocks * block_size (paged), S (no past). W = Dr or Dr / 2.
INPUTS: dict[str, str] = {
    "q": "T [B, S, H*(Dn+Dr)]: queries before rope; each head is nope | rope",
    "latent": "T [B, S, R]: the latent; or [B, S, R+Dr], packed latent | k_rope, when k_rope is absent and Dr > 0",
    "k_rope": "T [B, S, Dr], optional: rotary part of the key before rope",
    "kv_b_weight": "T [R, H*(Dn+Dv)]: latent to keys and values; each head is key | value. Constant, where possible",
    "kv_norm_weight": "float32 [R], optional: RMS norm of the latent",
    "cos": "T or float32 [B or 1, S, W], optional: cosines of the new tokens; or a table [positions, W] with "
    "position_ids",
    "sin": "as cos",
    "position_ids": "int64 [B or 1, S], optional: rows of the tables cos and sin",
    "q_scale": "float32 [B or 1, S], optional: one more factor on the scores of a query (attention temperature)",
    "past_latent": "T or int8 or float8e4m3fn [B, P, R] (or packed [B, P, R+Dr] in T when past_k_rope is absent and "
    "Dr > 0), optional; paged: [num_blocks, block_size, ...]",
    "past_k_rope": "T [B, P, Dr] (paged: [num_blocks, block_size, Dr]), optional: rotated keys",
    "past_latent_scale": "float32, optional: int8: [R], one a channel; float8: [B, P, ceil(R/128)] "
    "(paged: [num_blocks, block_size, ceil(R/128)])",
    "past_key": "T [B, H, P, Dn+Dr], optional: an expanded cache's rotated keys",
    "past_value": "T [B, H, P, Dv], optional: an expanded cache's values",
    "cache_lengths": "int32 or int64 [B], optional: the cache is static (or paged), this many tokens of it are there",
    "block_table": "int32 [B, max_blocks], optional: the cache is paged, block_table[b, p // block_size] has token p",
    "attn_mask": "T, float32 or bool [B or 1, H or 1, S or 1, L], optional: added to the scores; False masks out",
    "gate": "T [B, S, H], optional: output gate before its activation",
}

OUTPUTS: dict[str, str] = {
    "o": "T [B, S, H*Dv]",
    "present_latent": "past_latent's type (T); [B, L, width]; static, paged: past_latent's shape, may be its buffer",
    "present_k_rope": "T, likewise",
    "present_latent_scale": "float32, likewise (float8 only)",
    "present_key": "T [B, H, L, Dn+Dr]; static: past_key's shape, may be its buffer",
    "present_value": "T [B, H, L, Dv]; likewise",
}

REQUIRED_INPUTS = ("q", "latent", "kv_b_weight")

#: Tolerances: relative L2 norm of (result - float64 reference), by what computes and the type T. Never loosened.
#: With an 8-bit cache the reference reads, and writes, the same 8-bit numbers: ``cache_factor`` allows for new tokens
#: that fall on the other side of a rounding. ``hard_factor``: scores of a magnitude of several hundred.
TOLERANCES: dict[str, dict[str, float]] = {
    "cpu": {"float32": 2e-5, "float16": 2e-3, "bfloat16": 1e-2, "hard_factor": 5.0, "cache_factor": 2.0},
    "body": {"float32": 2e-5, "float16": 2e-3, "bfloat16": 1e-2, "hard_factor": 5.0, "cache_factor": 2.0},
    "cuda": {"float32": 1e-3, "float16": 3e-3, "bfloat16": 1e-2, "hard_factor": 4.0, "cache_factor": 2.0},
}

#: 8-bit caches against the exact one: the relative L2 error that a model's output for a single token may have by them.
#: o of many tokens has a fifth of it, for random latents (see README.md).
CACHE_LIMITS: dict[str, float] = {"int8": 5e-2, "float8": 1.5e-1}

ROPES = ("none", "half", "interleaved", "deinterleaved")
CACHES = ("none", "latent", "expanded")
CACHE_TYPES = ("same", "int8", "float8")
#: Channels that share one scale in a float8 cache.
FLOAT8_GROUP = 128
#: The widest the CUDA kernels take: heads of an expanded cache, and kv_lora_rank + qk_rope_head_dim of one of latents.
MAX_HEAD_CUDA, MAX_ROW_CUDA = 256, 704


@dataclass(frozen=True)
class MlaConfig:
    """Attributes of one call and which optional inputs and outputs it has (see :class:`..kda.spec.KdaConfig`)."""

    num_heads: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    kv_lora_rank: int
    scale: float
    # "none" | "half": pairs (x[j], x[j+Dr/2]), left in place | "interleaved": pairs (x[2j], x[2j+1]), left in place
    # | "deinterleaved": pairs (x[2j], x[2j+1]), written to j and j+Dr/2, as transformers does
    rope: str = "none"
    causal: int = 1  # key at position p serves query at position t only where p <= t
    window: int = 0  # > 0: and only where p > t - window
    gate_activation: str = "none"  # "none" | "sigmoid"
    kv_norm_eps: float = 1e-6
    cache: str = "none"  # "none" | "latent" | "expanded"
    cache_type: str = "same"  # of the latent: "same" as T | "int8" | "float8"
    # presence and form of optional operands (not attributes)
    packed_latent: bool = False  # latent holds k_rope too
    packed_cache: bool = False  # past_latent holds the rotated keys too
    has_kv_norm: bool = False
    has_position_ids: bool = False
    cos_width: int = 0  # W; 0 without rope
    has_q_scale: bool = False
    has_past: bool = False
    static_cache: bool = False  # cache_lengths is there
    paged: bool = False  # block_table is there
    has_mask: bool = False
    bool_mask: bool = False  # attn_mask is bool, not a number
    has_present: bool = False

    @property
    def qk_head_dim(self) -> int:
        """Width of one query or key head, nope and rope together."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    def attributes(self) -> dict[str, Any]:
        """The node's attributes, in a fixed order."""
        return {name: getattr(self, name) for name in ATTRIBUTES}

    def input_names(self) -> tuple[str, ...]:
        """Names of the formal inputs that a call of this configuration supplies."""
        rotary = self.qk_rope_head_dim > 0
        latent, expanded = (self.has_past and self.cache == kind for kind in ("latent", "expanded"))
        have = {
            "q": True,
            "latent": True,
            "k_rope": rotary and not self.packed_latent,
            "kv_b_weight": True,
            "kv_norm_weight": self.has_kv_norm,
            "cos": self.rope != "none",
            "sin": self.rope != "none",
            "position_ids": self.has_position_ids,
            "q_scale": self.has_q_scale,
            "past_latent": latent,
            "past_k_rope": latent and rotary and not self.packed_cache,
            "past_latent_scale": latent and self.cache_type != "same",
            "past_key": expanded,
            "past_value": expanded,
            "cache_lengths": self.static_cache,
            "block_table": self.paged,
            "attn_mask": self.has_mask,
            "gate": self.gate_activation != "none",
        }
        return tuple(name for name in INPUTS if have[name])

    def output_names(self) -> tuple[str, ...]:
        """Names of the outputs that a call of this configuration asks for."""
        latent, expanded = (self.has_present and self.cache == kind for kind in ("latent", "expanded"))
        have = {
            "o": True,
            "present_latent": latent,
            "present_k_rope": latent and self.qk_rope_head_dim > 0 and not self.packed_cache,
            "present_latent_scale": latent and self.cache_type == "float8",
            "present_key": expanded,
            "present_value": expanded,
        }
        return tuple(name for name in OUTPUTS if have[name])

    def overload(self) -> str:
        """A readable name for the specialised function body; equal configurations give equal names."""
        sizes = ("num_heads", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank")
        h, n, r, v, c = (getattr(self, name) for name in sizes)
        parts = [f"h{h}n{n}r{r}v{v}c{c}"]
        defaults = {f.name: f.default for f in fields(self)}
        for name, value in asdict(self).items():
            if name in sizes or value == defaults[name]:
                continue
            short = name.removeprefix("has_")
            shown = "" if value is True else f"_{value}" if isinstance(value, str) else f"_{value!r}"
            parts.append(short + shown)
        return "-".join(parts).replace(".", "p").replace("+", "")

    def check(self) -> Refusal | None:
        """Is the configuration one that the op defines? (Kernels may take less: see :func:`cuda_refusal`.)"""
        sizes = {name: getattr(self, name) for name in ("num_heads", "qk_nope_head_dim", "v_head_dim", "kv_lora_rank")}
        if min(sizes.values()) < 1 or self.qk_rope_head_dim < 0:
            shown = ", ".join(f"{name} {value}" for name, value in sizes.items())
            return Refusal(
                "geometry", f"{shown}, qk_rope_head_dim {self.qk_rope_head_dim}: 1 or more expected (rope: 0)"
            )
        if not math.isfinite(self.scale):
            return Refusal("scale", f"scale {self.scale} is not finite")
        if not 0.0 <= self.kv_norm_eps < math.inf:
            return Refusal("eps", f"kv_norm_eps {self.kv_norm_eps}: 0 or more expected")
        allowed: dict[str, tuple[Any, ...]] = {
            "rope": ROPES,
            "causal": (0, 1),
            "gate_activation": ("none", "sigmoid"),
            "cache": CACHES,
            "cache_type": CACHE_TYPES,
        }
        for name, values in allowed.items():
            if getattr(self, name) not in values:
                shown = ", ".join(map(str, values))
                return Refusal("attribute", f"{name} {getattr(self, name)!r}: expected one of {shown}")
        if self.rope != "none" and (self.qk_rope_head_dim < 2 or self.qk_rope_head_dim % 2):
            return Refusal("rope", f"rope {self.rope!r} needs an even qk_rope_head_dim, not {self.qk_rope_head_dim}")
        widths = (self.qk_rope_head_dim, self.qk_rope_head_dim // 2) if self.rope != "none" else (0,)
        if self.cos_width not in widths:
            return Refusal("rope", f"cos_width {self.cos_width}: expected {' or '.join(map(str, widths))}")
        if self.window < 0 or (self.window and not self.causal):
            return Refusal("window", f"window {self.window}: 0 for none, or 1 or more with causal")
        if self.has_position_ids and self.rope == "none":
            return Refusal("rope", "position_ids without rope")
        if self.bool_mask and not self.has_mask:
            return Refusal("mask", "bool_mask without attn_mask")
        return self._check_cache()

    def _check_cache(self) -> Refusal | None:
        if self.cache == "none" and (self.has_past or self.has_present or self.static_cache or self.paged):
            return Refusal("cache", "past, present, cache_lengths or block_table without a cache")
        if self.static_cache and not self.has_past:
            return Refusal("cache", "cache_lengths without a past cache")
        if self.paged and not (self.static_cache and self.cache == "latent"):
            return Refusal("cache", "block_table needs cache_lengths and a cache of latents")
        if self.cache_type != "same" and (self.cache != "latent" or self.packed_cache):
            return Refusal(
                "cache", f"cache_type {self.cache_type!r} needs a cache of latents apart from the rotary keys"
            )
        if self.cache_type != "same" and not self.has_past:
            return Refusal("cache", f"cache_type {self.cache_type!r} needs past_latent and its scales")
        if (self.packed_latent or self.packed_cache) and not self.qk_rope_head_dim:
            return Refusal("packed", "packed_latent or packed_cache without a rotary part")
        if self.packed_cache and self.cache != "latent":
            return Refusal("packed", "packed_cache without a cache of latents")
        return None


ATTRIBUTES = (
    "num_heads",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "kv_lora_rank",
    "scale",
    "rope",
    "causal",
    "window",
    "gate_activation",
    "kv_norm_eps",
    "cache",
    "cache_type",
)


def cuda_refusal(config: MlaConfig) -> Refusal | None:
    """Why the CUDA kernels do not take this configuration, or None. The C++ check says the same (``mla.h``)."""
    refused = config.check()
    if refused is not None:
        return refused
    if config.cache == "expanded":
        widths = (config.qk_head_dim, config.v_head_dim)
        if max(widths) > MAX_HEAD_CUDA:
            return Refusal(
                "head-dim",
                f"heads of {widths[0]} and {widths[1]} channels in an expanded cache: kernels take up to "
                f"{MAX_HEAD_CUDA}",
            )
        return None
    row = config.kv_lora_rank + config.qk_rope_head_dim
    if row > MAX_ROW_CUDA:
        return Refusal("row", f"kv_lora_rank + qk_rope_head_dim {row}: kernels take up to {MAX_ROW_CUDA}")
    return None
