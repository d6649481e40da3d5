"""Random and hostile inputs for the op: shared by the tests, the CUDA checks and the proofs."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from .quantize import FLOAT8, int8_scales, quantize_float8, quantize_int8
from .spec import MlaConfig

Array = NDArray[Any]

#: What :func:`draw_inputs` can draw. ``huge-scores`` is the numerically hard one (tolerances: ``hard_factor``). Unused
#: slots of static and paged caches are NaN in every case (scales too; int8 codes are the farthest ones).
CASES = (
    "normal",
    "huge-scores",  # magnitudes of several hundred: the softmax picks one key
    "equal-scores",  # queries of zeros: every key that is seen counts the same
    "masked-rows",  # with attn_mask: some queries see nothing, others one key; lowest finite numbers, not only infinity
    "empty-cache",  # lengths of zero
    "full-cache",  # every slot is used
    "odd-positions",  # position_ids that fall, repeat and reach the tables' last row
    "large-values",  # latents a hundred times as large in some channels
)

DTYPES: dict[str, Any] = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}

#: Rows of the tables cos and sin.
TABLE_ROWS = 300


def _cache(
    values: dict[str, Array],
    config: MlaConfig,
    batch: int,
    capacity: int,
    rng: np.random.Generator,
    dtype: str,
    used: Array,
) -> None:
    """Past caches [B, capacity, ...] with poison where ``used`` [B, capacity] is False."""
    kind = DTYPES[dtype]
    if config.cache == "expanded":
        for name, width in (("past_key", config.qk_head_dim), ("past_value", config.v_head_dim)):
            past = rng.standard_normal((batch, config.num_heads, capacity, width))
            past[np.broadcast_to(~used[:, None, :], past.shape[:3])] = np.nan
            values[name] = past.astype(kind)
        return
    rank, rope = config.kv_lora_rank, config.qk_rope_head_dim
    latent = rng.standard_normal((batch, capacity, rank)) * _channel_sizes(values, rank)
    keys = rng.standard_normal((batch, capacity, rope))
    keys[~used] = np.nan
    if config.cache_type == "int8":
        scales = int8_scales(4.0 * _channel_sizes(values, rank))
        codes = quantize_int8(latent, scales)
        codes[~used] = -127
        values |= {"past_latent": codes, "past_latent_scale": scales}
    elif config.cache_type == "float8":
        codes, scales = quantize_float8(latent)
        codes[~used] = FLOAT8(np.nan)
        scales[~used] = np.nan
        values |= {"past_latent": codes, "past_latent_scale": scales}
    else:
        latent[~used] = np.nan
        joined = np.concatenate([latent, keys], axis=-1) if config.packed_cache else latent
        values["past_latent"] = joined.astype(kind)
    values["past_k_rope"] = keys.astype(kind)


def _channel_sizes(values: dict[str, Array], rank: int) -> Array:
    return values.get("_sizes", np.ones(rank))


def _into_blocks(
    values: dict[str, Array], lengths: Array, tokens: int, block_size: int, rng: np.random.Generator
) -> None:
    """Move caches [B, capacity, ...] into a pool of blocks in random order; blocks of nobody are copies of poison."""
    batch, capacity = values["past_latent"].shape[:2]
    per_row = -(-capacity // block_size)
    needed = [-(-int(n + tokens) // block_size) for n in lengths]
    blocks = sum(needed) + 2
    order = rng.permutation(blocks)
    table = np.full((batch, per_row), -1, np.int32)
    table[:, 1::2] = blocks + 7  # what is not looked at may be anything
    pools: dict[str, Array] = {}
    for name in ("past_latent", "past_k_rope", "past_latent_scale"):
        past = values.get(name)
        if past is None or past.ndim != 3:
            continue
        pool = np.zeros((blocks, block_size, past.shape[2]), past.dtype)
        pool[...] = -127 if past.dtype == np.int8 else np.nan
        pools[name] = pool
    at = 0
    for b in range(batch):
        for i in range(needed[b]):
            table[b, i] = order[at]
            at += 1
            for name, pool in pools.items():
                part = values[name][b, i * block_size : (i + 1) * block_size]
                pool[table[b, i], : part.shape[0]] = part
    values |= pools
    values["block_table"] = table


def _mask(
    config: MlaConfig, shape: tuple[int, ...], rng: np.random.Generator, case: str, dtype: str, new_from: Array
) -> Array:
    """[B or 1, H or 1, S or 1, L] with a share of the keys masked out; each query keeps its own key, unless the case
    says otherwise."""
    seen = rng.uniform(size=shape) < 0.7
    rows, keys = shape[2], shape[3]
    if case == "masked-rows":
        seen[:, :, ::3] = False
        seen[:, :, 1::3] = False
        seen[:, :, 1::3, : max(1, keys // 2) : max(1, keys // 2)] = True
    else:
        for b in range(shape[0]):
            for i in range(rows):
                here = np.unique(new_from[min(b, len(new_from) - 1)] + i) if shape[0] > 1 else np.unique(new_from + i)
                seen[b, :, i, here[here < keys]] = True
    if config.bool_mask:
        return seen
    kind = DTYPES[dtype]
    lowest = float(ml_dtypes.finfo(kind).min) if case != "masked-rows" else -np.inf
    return np.where(seen, rng.normal(0.0, 0.5, shape), lowest).astype(kind)


def draw_inputs(
    config: MlaConfig,
    batch: int,
    seq_len: int,
    past_len: int,
    rng: np.random.Generator,
    case: str = "normal",
    dtype: str = "float32",
    *,
    cos_dtype: str = "float32",
    mask_dtype: str = "",
    lengths_dtype: str = "int32",
    block_size: int = 16,
    shared: bool = False,
) -> dict[str, Array]:
    """Draw the operands that ``config.input_names()`` names.

    Args:
        config: the call.
        batch, seq_len: B and S.
        past_len: tokens of a growing cache; capacity of a static one, ``seq_len`` or more (paged: in whole blocks).
        rng: where randomness comes from; equal generators give equal inputs.
        case: one of :data:`CASES`.
        dtype: element type of T. cos_dtype: of cos and sin. mask_dtype: of a mask of numbers, T where "".
        lengths_dtype: of ``cache_lengths``. block_size: of a paged cache.
        shared: cos, sin, position_ids and q_scale have one row for the whole batch, the mask one for all heads too.

    Raises:
        ValueError: an unknown case, or a static cache without room for the new tokens.
    """
    if case not in CASES:
        raise ValueError(f"unknown case {case!r}: one of {', '.join(CASES)}")
    if config.static_cache and past_len < seq_len:
        raise ValueError(f"a static cache of {past_len} has no room for {seq_len} tokens")
    heads, nope, rope, rank = (
        config.num_heads,
        config.qk_nope_head_dim,
        config.qk_rope_head_dim,
        config.kv_lora_rank,
    )
    lead, rows = (batch, seq_len), 1 if shared else batch
    values: dict[str, Array] = {}
    if case == "large-values":
        values["_sizes"] = np.where(rng.uniform(size=rank) < 0.1, 100.0, 1.0)
    sizes = _channel_sizes(values, rank)
    # scores of about 1, times 300 where they are to be huge
    width = config.qk_head_dim
    size = {"huge-scores": 300.0, "equal-scores": 0.0}.get(case, 1.0) / (abs(config.scale) * np.sqrt(width) or 1.0)
    values["q"] = size * rng.standard_normal((*lead, heads * width))
    latent, k_rope = rng.standard_normal((*lead, rank)) * sizes, rng.standard_normal((*lead, rope))
    values["latent"] = np.concatenate([latent, k_rope], axis=-1) if config.packed_latent else latent
    values["k_rope"] = k_rope
    weight = rng.standard_normal((rank, heads * (nope + config.v_head_dim))) / np.sqrt(rank)
    values["kv_b_weight"] = weight / sizes[:, None]
    values["kv_norm_weight"] = rng.uniform(0.5, 1.5, rank).astype(np.float32)

    angle_shape = (TABLE_ROWS,) if config.has_position_ids else (rows, seq_len)
    half = rng.uniform(-np.pi, np.pi, (*angle_shape, max(rope // 2, 1)))
    if config.cos_width == rope and config.rope != "none":
        half = np.repeat(half, 2, axis=-1) if config.rope == "interleaved" else np.concatenate([half, half], axis=-1)
    values |= {"cos": np.cos(half).astype(DTYPES[cos_dtype]), "sin": np.sin(half).astype(DTYPES[cos_dtype])}
    ids = rng.integers(0, TABLE_ROWS, (rows, seq_len))
    if case == "odd-positions":
        ids = np.sort(ids, axis=-1)[:, ::-1].copy()
        ids[:, : seq_len // 2] = ids[:, :1]
        ids[:, -1:] = TABLE_ROWS - 1
    values["position_ids"] = ids.astype(np.int64)
    values["q_scale"] = rng.uniform(0.5, 1.5, (rows, seq_len)).astype(np.float32)

    lengths = np.full(batch, past_len if config.has_past else 0)
    keys = int(past_len + seq_len if config.has_past else seq_len)
    if config.static_cache:
        keys = -(-past_len // block_size) * block_size if config.paged else past_len
        lengths = rng.integers(0, keys - seq_len + 1, batch)
        if case == "empty-cache":
            lengths[...] = 0
        elif case == "full-cache":
            lengths[...] = keys - seq_len
    if config.has_past:
        capacity = keys if config.static_cache else past_len
        used = np.arange(capacity)[None, :] < lengths[:, None]
        _cache(values, config, batch, capacity, rng, dtype, used)
    if config.paged:
        _into_blocks(values, lengths, seq_len, block_size, rng)
    values["cache_lengths"] = lengths.astype(lengths_dtype)
    if config.has_mask:
        shape = (rows, 1 if shared else heads, seq_len, keys)
        values["attn_mask"] = _mask(config, shape, rng, case, mask_dtype or dtype, lengths)
    values["gate"] = rng.normal(0.0, 2.0, (*lead, heads))

    kept = ("q", "latent", "k_rope", "kv_b_weight", "gate")
    return {name: values[name].astype(DTYPES[dtype]) if name in kept else values[name] for name in config.input_names()}
