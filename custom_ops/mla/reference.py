"""The op in float64 NumPy, one sequence after the other: the truth for the body and the kernels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .quantize import dequantize_float8, dequantize_int8, quantize_float8, quantize_int8
from .spec import TOLERANCES, MlaConfig

Array = NDArray[Any]
Float64 = NDArray[np.float64]

#: Caches and what continues them.
CACHES = {
    "present_latent": "past_latent",
    "present_k_rope": "past_k_rope",
    "present_latent_scale": "past_latent_scale",
    "present_key": "past_key",
    "present_value": "past_value",
}


def rotate(kind: str, x: Float64, cos: Float64, sin: Float64) -> Float64:
    """Rotary embedding of the last axis of ``x``; ``cos`` and ``sin`` broadcast to it, Dr or Dr / 2 wide."""
    half = x.shape[-1] // 2
    if kind == "half":
        a, b = x[..., :half], x[..., half:]
    else:
        a, b = x[..., 0::2], x[..., 1::2]
    if kind == "interleaved" and cos.shape[-1] > half:
        cos_a, cos_b, sin_a, sin_b = cos[..., 0::2], cos[..., 1::2], sin[..., 0::2], sin[..., 1::2]
    else:
        cos_a, cos_b, sin_a, sin_b = cos[..., :half], cos[..., -half:], sin[..., :half], sin[..., -half:]
    first, second = a * cos_a - b * sin_a, b * cos_b + a * sin_b
    if kind != "interleaved":
        return np.concatenate([first, second], axis=-1)
    return np.stack([first, second], axis=-1).reshape(x.shape)


def softmax(scores: Float64) -> Float64:
    """Over the last axis; zeros where every score is minus infinity, or there is none."""
    if scores.shape[-1] == 0:
        return scores
    largest = np.max(scores, axis=-1, keepdims=True)
    weights = np.exp(scores - np.where(np.isneginf(largest), 0.0, largest))
    total = np.sum(weights, axis=-1, keepdims=True)
    return weights / np.where(total == 0.0, 1.0, total)


def lengths(config: MlaConfig, inputs: Mapping[str, Array]) -> list[int]:
    """Tokens of each row's cache before the call."""
    batch = inputs["q"].shape[0]
    if config.static_cache:
        return [int(n) for n in inputs["cache_lengths"]]
    if not config.has_past:
        return [0] * batch
    past = inputs["past_key"].shape[2] if config.cache == "expanded" else inputs["past_latent"].shape[1]
    return [int(past)] * batch


def check_values(config: MlaConfig, inputs: Mapping[str, Array]) -> None:
    """Raise ValueError for a position, a length or a block id that the op calls an error."""
    if config.has_position_ids:
        ids, rows = np.asarray(inputs["position_ids"]), inputs["cos"].shape[0]
        if np.any((ids < 0) | (ids >= rows)):
            raise ValueError(f"position_ids from {ids.min()} to {ids.max()}: the tables have {rows} rows")
    if not config.static_cache:
        return
    tokens = inputs["q"].shape[1]
    if config.paged:
        size = inputs["past_latent"].shape[1]
        capacity = inputs["block_table"].shape[1] * size
    else:
        capacity = inputs["past_latent"].shape[1] if config.cache == "latent" else inputs["past_key"].shape[2]
    for b, there in enumerate(lengths(config, inputs)):
        if there < 0 or there + tokens > capacity:
            raise ValueError(f"cache_lengths[{b}] {there} and {tokens} new tokens: the cache has room for {capacity}")
        if config.paged:
            ids, blocks = inputs["block_table"][b, : -(-(there + tokens) // size)], inputs["past_latent"].shape[0]
            if np.any((ids < 0) | (ids >= blocks)):
                raise ValueError(f"block_table[{b}] has ids {list(ids)}: there are {blocks} blocks")


class _Row:
    """One sequence of the batch, in float64."""

    def __init__(self, config: MlaConfig, inputs: Mapping[str, Array], row: int, there: int) -> None:
        self.config, self.inputs, self.row, self.there = config, inputs, row, there
        self.tokens: int = inputs["q"].shape[1]
        self.blocks: Array | None = inputs["block_table"][row] if config.paged else None

    def get(self, name: str) -> Float64:
        """Row ``row`` of an operand [B or 1, ...]."""
        value = self.inputs[name]
        return np.asarray(value[self.row if value.shape[0] > 1 else 0]).astype(np.float64)

    def slots(self, start: int, stop: int) -> tuple[Any, ...]:
        """Index of the tokens [start, stop) of this row in a cache [B, P, ...] or [num_blocks, block_size, ...]."""
        if self.blocks is None:
            return self.row, slice(start, stop)
        size = self.inputs["past_latent"].shape[1]
        at = np.arange(start, stop)
        return self.blocks[at // size], at % size

    def angles(self) -> tuple[Float64, Float64]:
        """cos and sin of the new tokens, [S, W]."""
        if not self.config.has_position_ids:
            return self.get("cos"), self.get("sin")
        ids = self.inputs["position_ids"]
        at = ids[self.row if ids.shape[0] > 1 else 0]
        cos, sin = (np.asarray(self.inputs[name][at]).astype(np.float64) for name in ("cos", "sin"))
        return cos, sin

    def queries(self) -> Float64:
        """[H, S, Dn+Dr], rotated."""
        config = self.config
        q = self.get("q").reshape(self.tokens, config.num_heads, config.qk_head_dim).swapaxes(0, 1)
        if config.rope == "none":
            return q
        nope, rope = q[..., : config.qk_nope_head_dim], q[..., config.qk_nope_head_dim :]
        return np.concatenate([nope, rotate(config.rope, rope, *self.angles())], axis=-1)

    def new_tokens(self) -> tuple[Float64, Float64]:
        """Latents [S, R] after their norm, and rotated keys [S, Dr]."""
        config = self.config
        latent, rank = self.get("latent"), config.kv_lora_rank
        if config.packed_latent:
            latent, rope = latent[:, :rank], latent[:, rank:]
        else:
            rope = self.get("k_rope") if config.qk_rope_head_dim else np.zeros((self.tokens, 0))
        if config.has_kv_norm:
            latent = latent / np.sqrt(np.mean(latent * latent, axis=-1, keepdims=True) + config.kv_norm_eps)
            latent = latent * np.asarray(self.inputs["kv_norm_weight"], np.float64)
        if config.rope != "none":
            rope = rotate(config.rope, rope, *self.angles())
        return latent, rope

    def mask(self, keys: int) -> Float64:
        """What is added to the scores [H, S, keys] of the keys [0, keys)."""
        config = self.config
        at, new = np.arange(keys)[None, :], self.there + np.arange(self.tokens)[:, None]
        seen = np.full((self.tokens, keys), True)
        if config.causal:
            seen &= at <= new
        if config.window:
            seen &= at > new - config.window
        added = np.where(seen, 0.0, -np.inf)[None]
        if not config.has_mask:
            return added
        mask = self.inputs["attn_mask"]
        mine = mask[self.row if mask.shape[0] > 1 else 0][..., :keys]
        if config.bool_mask:
            return added + np.where(mine, 0.0, -np.inf)
        return added + mine.astype(np.float64)

    def expand(self, latent: Float64, rope: Float64) -> tuple[Float64, Float64]:
        """Keys [H, L, Dn+Dr] and values [H, L, Dv]."""
        config = self.config
        heads, nope = config.num_heads, config.qk_nope_head_dim
        weight = np.asarray(self.inputs["kv_b_weight"]).astype(np.float64)
        both = (latent @ weight).reshape(latent.shape[0], heads, nope + config.v_head_dim).swapaxes(0, 1)
        shared = np.broadcast_to(rope, (heads, *rope.shape))
        return np.concatenate([both[..., :nope], shared], axis=-1), both[..., nope:]

    def attend(self, key: Float64, value: Float64) -> Float64:
        """[S, H*Dv]."""
        config = self.config
        scores = config.scale * (self.queries() @ key.swapaxes(-1, -2))
        if config.has_q_scale:
            scores = scores * self.get("q_scale")[None, :, None]
        o = (softmax(scores + self.mask(key.shape[1])) @ value).swapaxes(0, 1)
        if config.gate_activation == "sigmoid":
            o = o * np.exp(-np.logaddexp(0.0, -self.get("gate")))[..., None]
        return o.reshape(self.tokens, config.num_heads * config.v_head_dim)


def _latent_row(row: _Row, present: dict[str, Array], written: Mapping[str, Array] | None) -> tuple[Float64, Float64]:
    """Write a row's new tokens into the caches of latents; its whole cache: latents [L, R], rotated keys [L, Dr]."""
    config, rank = row.config, row.config.kv_lora_rank
    latent, rope = row.new_tokens()
    new, everything = (row.slots(start, row.there + row.tokens) for start in (row.there, 0))
    cache = present["present_latent"]
    if config.packed_cache:
        cache[new] = np.concatenate([latent, rope], axis=-1)
        whole = cache[everything]
        return whole[:, :rank], whole[:, rank:]
    if config.cache_type == "same":
        cache[new] = latent
        latents = cache[everything]
    elif config.cache_type == "int8":
        scales = row.inputs["past_latent_scale"]
        cache[new] = quantize_int8(latent, scales) if written is None else written["present_latent"][new]
        latents = dequantize_int8(cache[everything], scales)
    else:
        codes, scales = quantize_float8(latent)
        if written is not None:
            codes, scales = written["present_latent"][new], written["present_latent_scale"][new]
        cache[new] = codes
        present["present_latent_scale"][new] = scales
        latents = dequantize_float8(cache[everything], present["present_latent_scale"][everything])
    if not config.qk_rope_head_dim:
        return latents, np.zeros((latents.shape[0], 0))
    present["present_k_rope"][new] = rope
    return latents, present["present_k_rope"][everything]


def _expanded_row(row: _Row, present: dict[str, Array]) -> tuple[Float64, Float64]:
    """Likewise for a cache of keys and values: [H, L, .]."""
    key, value = row.expand(*row.new_tokens())
    stop = row.there + row.tokens
    present["present_key"][row.row, :, row.there : stop] = key
    present["present_value"][row.row, :, row.there : stop] = value
    return present["present_key"][row.row, :, :stop], present["present_value"][row.row, :, :stop]


def _start(config: MlaConfig, inputs: Mapping[str, Array]) -> dict[str, Array]:
    """The caches before the new tokens, as large as they will be. 8-bit codes keep their type, the rest is float64."""
    batch, tokens = inputs["q"].shape[:2]
    shapes: dict[str, tuple[int, ...]]
    if config.cache == "expanded":
        widths = {"present_key": config.qk_head_dim, "present_value": config.v_head_dim}
        shapes = {name: (batch, config.num_heads, 0, width) for name, width in widths.items()}
    else:
        packed = config.qk_rope_head_dim if config.packed_cache else 0
        shapes = {"present_latent": (batch, 0, config.kv_lora_rank + packed)}
        if config.qk_rope_head_dim and not config.packed_cache:
            shapes["present_k_rope"] = (batch, 0, config.qk_rope_head_dim)
        if config.cache_type == "float8":
            shapes["present_latent_scale"] = ()
    caches: dict[str, Array] = {}
    for name, shape in shapes.items():
        past = np.asarray(inputs[CACHES[name]]) if config.has_past else np.zeros(shape)
        if name != "present_latent" or config.cache_type == "same":
            past = past.astype(np.float64)
        if not config.static_cache:
            axis = 2 if config.cache == "expanded" else 1
            room = (*past.shape[:axis], tokens, *past.shape[axis + 1 :])
            past = np.concatenate([past, np.zeros(room, past.dtype)], axis=axis)
        caches[name] = past.copy()
    return caches


def reference(
    config: MlaConfig, inputs: Mapping[str, Array], written: Mapping[str, Array] | None = None
) -> dict[str, Array]:
    """Run the op in float64.

    Args:
        config: what the call is; ``config.check()`` must be None.
        inputs: the operands named by ``config.input_names()``, shapes as in ``spec.INPUTS``, any float dtype.
        written: outputs of another implementation. The codes and scales of new tokens of an 8-bit cache are taken
            from there: where a number lies between two codes, both are right, and what follows is compared exactly.

    Returns:
        ``o`` [B, S, H*Dv], and with a cache all of its outputs, whether the configuration asks for them or not. All
        float64 but 8-bit codes. Unused slots are as they were.

    Raises:
        ValueError: the configuration is not one the op defines, an operand is missing, or a position, a length or a
            block id is out of range.
    """
    refused = config.check()
    if refused is not None:
        raise ValueError(str(refused))
    missing = [name for name in config.input_names() if name not in inputs]
    if missing:
        raise ValueError(f"missing inputs: {', '.join(missing)}")
    check_values(config, inputs)
    present = _start(config, inputs)
    rows = []
    for b, there in enumerate(lengths(config, inputs)):
        row = _Row(config, inputs, b, there)
        if config.cache == "expanded":
            key, value = _expanded_row(row, present)
        else:
            key, value = row.expand(*_latent_row(row, present, written))
        rows.append(row.attend(key, value))
    width = config.num_heads * config.v_head_dim
    o = np.stack(rows) if rows else np.zeros((0, inputs["q"].shape[1], width))
    return {"o": o, **(present if config.cache != "none" else {})}


def used_slots(config: MlaConfig, inputs: Mapping[str, Array]) -> Array:
    """Which slots of the present cache hold tokens: bool [B, L], paged [num_blocks, block_size]."""
    tokens, there = inputs["q"].shape[1], lengths(config, inputs)
    if config.paged:
        used = np.zeros(inputs["past_latent"].shape[:2], bool)
        for b, n in enumerate(there):
            used[_Row(config, inputs, b, n).slots(0, n + tokens)] = True
        return used
    room = (there[0] + tokens) if there else tokens
    if config.static_cache:
        room = inputs["past_key"].shape[2] if config.cache == "expanded" else inputs["past_latent"].shape[1]
    return np.arange(room)[None, :] < (np.asarray(there, np.int64) + tokens)[:, None]


def relative_error(result: Array, truth: Array) -> float:
    """Relative L2 norm of ``result - truth``; infinite if anything is not finite, absolute where truth is zero."""
    got, want = np.asarray(result).astype(np.float64), np.asarray(truth).astype(np.float64)
    if got.shape != want.shape or not np.all(np.isfinite(got)):
        return float("inf")
    norm = float(np.linalg.norm(want))
    error = float(np.linalg.norm(got - want))
    return error / norm if norm > 0 else error


def errors(config: MlaConfig, inputs: Mapping[str, Array], got: Mapping[str, Array]) -> dict[str, float]:
    """Relative errors of an implementation's outputs, by name.

    Unused slots of a cache must hold what they held before. 8-bit codes count as wrong (infinity) where they are
    further from the truth than rounding explains: more than half a step and a thousandth; other outputs are then
    compared with what follows from those codes.
    """
    exact = reference(config, inputs)
    want = reference(config, inputs, got) if config.cache_type != "same" and "present_latent" in got else exact
    found = {}
    for name, value in got.items():
        result, truth = np.asarray(value).astype(np.float64), np.asarray(want[name]).astype(np.float64)
        if name in CACHES:
            if result.shape != truth.shape:
                found[name] = float("inf")
                continue
            unused = ~used_slots(config, inputs)
            axis = 2 if config.cache == "expanded" else 1
            moved, moved_truth = (np.moveaxis(x, axis, 1) for x in (result, truth))
            if not np.array_equal(moved[unused], moved_truth[unused], equal_nan=True):
                found[name] = float("inf")
                continue
            used = ~unused
            result, truth = moved[used], moved_truth[used]
        found[name] = relative_error(result, truth)
    if want is not exact:
        found |= _code_errors(config, inputs, got)
    return found


def _code_errors(config: MlaConfig, inputs: Mapping[str, Array], got: Mapping[str, Array]) -> dict[str, float]:
    """0 where every new code is a nearest one up to a thousandth of a step, else infinity."""
    worst = 0.0
    for b, there in enumerate(lengths(config, inputs)):
        row = _Row(config, inputs, b, there)
        latent, _ = row.new_tokens()
        new = row.slots(there, there + row.tokens)
        codes = np.asarray(got["present_latent"][new]).astype(np.float64)
        if config.cache_type == "int8":
            exact = np.clip(latent / np.asarray(inputs["past_latent_scale"], np.float64), -127, 127)
            distance = np.abs(codes - exact)
        else:
            _, scales = quantize_float8(latent)
            given = np.asarray(got["present_latent_scale"][new]).astype(np.float64)
            if not np.allclose(given, scales, rtol=1e-2 if config.has_kv_norm else 1e-6, atol=0):
                return {"present_latent_scale": float("inf")}
            groups = np.repeat(given, 128, axis=-1)[:, : latent.shape[-1]]
            exact = np.clip(latent / groups, -448, 448)
            _, exponent = np.frexp(exact)
            distance = np.abs(codes - exact) / np.ldexp(1.0, np.maximum(exponent - 1, -6) - 3)
        worst = max(worst, float(np.max(distance, initial=0.0)))
    return {"present_latent": 0.0 if worst <= 0.501 else float("inf")}


def tolerance(what: str, dtype: str, case: str = "normal", cache_type: str = "same") -> float:
    """The spec's tolerance for "cpu", "body" or "cuda", an element type, a case of ``draw.CASES`` and a cache."""
    table = TOLERANCES[what]
    factor = table["hard_factor"] if case == "huge-scores" else 1.0
    return table[dtype] * factor * (table["cache_factor"] if cache_type != "same" else 1.0)
