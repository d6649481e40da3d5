"""Hostile operands for proofs of latent attention."""

from __future__ import annotations

import numpy as np

from ...custom_ops.mla.spec import MlaConfig
from ..candidate import Candidate

Arrays = dict[str, np.ndarray]

#: What is drawn: "tiny-latent" brings the norm's epsilon to light, "large-scores" lets the softmax pick one key,
#: "equal-scores" makes all keys count the same, "wide" draws over many orders of magnitude, "extreme-last" lets the
#: last token be anything, "padded" has rows of zeros at the end, "masked-rows" leaves some queries without a key.
HOSTILE = (
    "normal",
    "tiny-latent",
    "large-scores",
    "equal-scores",
    "wide",
    "extreme-last",
    "padded",
    "gate-extreme",
    "masked-rows",
)


def draw(candidate: Candidate, batch: int, tokens: int, past: int, seed: int, case: str) -> Arrays:
    """Operands of the op for one case. Cosines and sines are any numbers: a layout that only works for pairs that
    lie on the unit circle, or are equal, shows."""
    config: MlaConfig = candidate.config
    rng = np.random.default_rng(seed)
    heads, width = config.num_heads, config.qk_head_dim
    size = {"large-scores": 30.0, "equal-scores": 0.0}.get(case, 1.0) / (abs(config.scale) * width**0.5)
    found: Arrays = {"q": size * rng.standard_normal((batch, tokens, heads * width))}
    if "kv_b_weight" in candidate.operands:  # dequantized in the graph
        columns = heads * (config.qk_nope_head_dim + config.v_head_dim)
        found["kv_b_weight"] = rng.standard_normal((config.kv_lora_rank, columns)) / config.kv_lora_rank**0.5
    latent = rng.standard_normal((batch, tokens, config.kv_lora_rank))
    if case == "tiny-latent":
        small = config.kv_norm_eps**0.5 if config.has_kv_norm else 1e-3
        latent *= small * rng.uniform(0.3, 3.0, (batch, tokens, 1))
    k_rope = rng.standard_normal((batch, tokens, config.qk_rope_head_dim))
    if config.packed_latent:
        found["latent"] = np.concatenate([latent, k_rope], axis=-1)
    else:
        found |= {"latent": latent, "k_rope": k_rope}
    if config.rope != "none":
        for name in ("cos", "sin"):
            rows = batch if _has(candidate, name, "batch") else 1
            found[name] = rng.uniform(-1.5, 1.5, (rows, tokens, config.cos_width))
    if config.has_q_scale:
        rows = batch if _has(candidate, "q_scale", "batch") else 1
        found["q_scale"] = rng.uniform(0.4, 1.8, (rows, tokens))
    if config.gate_activation != "none":
        found["gate"] = rng.normal(0.0, 30.0 if case == "gate-extreme" else 2.0, (batch, tokens, heads))
    _cache(config, found, batch, past, rng)
    keys = past + tokens if config.has_past else tokens
    if config.static_cache:
        keys = past
        one = candidate.operands["cache_lengths"].pieces[0].each_row_of is not None
        found["cache_lengths"] = np.resize(rng.integers(0, past - tokens + 1, 1 if one else batch), batch)
    if config.has_mask:
        found["attn_mask"] = _mask(candidate, batch, tokens, keys, rng, case)
    if case == "wide":
        for name in ("latent", "k_rope", "gate", "past_value"):
            if name in found and (name != "latent" or config.has_kv_norm):
                found[name] = found[name] * 10.0 ** rng.uniform(-1.0, 1.0, found[name].shape)
    elif case == "extreme-last":
        for name in ("q", "latent", "k_rope", "gate"):
            if name in found:
                found[name][:, -1:] *= 10.0 ** rng.uniform(0.0, 1.0, found[name][:, -1:].shape)
    elif case == "padded" and tokens > 1:
        for name in ("q", "latent", "k_rope", "gate"):
            if name in found:
                found[name][:, -(tokens // 3 + 1) :] = 0.0
    names = config.input_names()
    return {n: a if a.dtype.kind in "bi" else a.astype(np.float32) for n, a in found.items() if n in names}


def _cache(config: MlaConfig, found: Arrays, batch: int, past: int, rng: np.random.Generator) -> None:
    if not config.has_past:
        return
    rope = config.qk_rope_head_dim
    if config.cache == "expanded":
        found["past_key"] = rng.standard_normal((batch, config.num_heads, past, config.qk_head_dim))
        found["past_value"] = rng.standard_normal((batch, config.num_heads, past, config.v_head_dim))
        return
    wide = config.kv_lora_rank + (rope if config.packed_cache else 0)
    found["past_latent"] = rng.standard_normal((batch, past, wide))
    found["past_k_rope"] = rng.standard_normal((batch, past, rope))


def _mask(candidate: Candidate, batch: int, tokens: int, keys: int, rng: np.random.Generator, case: str) -> np.ndarray:
    """Any mask; but for "masked-rows" it leaves every query a key."""
    config = candidate.config
    piece = candidate.operands["attn_mask"].pieces[0]
    rows = batch if "batch" in piece.axes else 1
    order = piece.permutation or (0, 1, 2, 3)
    queries = tokens if len(piece.axes) == 4 and piece.axes[order[2]] == "tokens" else 1
    heads = 1
    dims = piece.value.shape
    if len(piece.axes) == 4 and dims is not None:
        each = dims[order[1]]
        heads = each if isinstance(each, int) else 1
    shape = (rows, heads, queries, keys)
    kept = rng.random(shape) < 0.7
    if config.causal and config.window:
        kept[..., ::2] = True
        if config.window == 1:
            kept[...] = True
    kept[..., 0] = True
    if case == "masked-rows":
        if queries > 1:
            kept[..., ::2, :] = False
        else:
            # with a causal mask the first queries are left without a key, else those of a whole sequence
            kept[..., : max(keys // 2, 1) if config.causal else keys] = False
            kept[:1] &= keys > 1
        if not config.bool_mask:
            return np.where(kept, 0.0, np.finfo(np.float32).min)
    if config.bool_mask:
        return kept
    added = rng.standard_normal(shape)
    return np.where(kept, added, -np.inf if case in ("normal", "padded") else -3e4)


def _has(candidate: Candidate, name: str, label: str) -> bool:
    if name not in candidate.operands:
        return False
    return label in candidate.operands[name].pieces[0].axes
