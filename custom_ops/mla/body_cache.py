"""The caches in the function body: new tokens appended or written, and what the attention reads."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from ..common.graph_builder import GraphBuilder
from .body_parts import not_negative
from .quantize import FLOAT8_MAX, INT8_MAX, float8_groups
from .spec import FLOAT8_GROUP, MlaConfig

FLOAT, INT64 = ir.DataType.FLOAT, ir.DataType.INT64
#: Caches after a call, by output name.
Cached = dict[str, ir.Value]


def arange(b: GraphBuilder, count: ir.Value) -> ir.Value:
    """0 to count - 1, for an int64 [1]."""
    return b.op("Range", b.const(0), b.squeeze(count, 0), b.const(1))


class Cache:
    """The caches of one call.

    Attributes:
        batch: B, int64 [1].
        tokens: S, int64 [1].
        there: tokens before the call, int64 [B] or [1].
    """

    def __init__(self, b: GraphBuilder, config: MlaConfig, dtype: ir.DataType, inputs: Mapping[str, ir.Value]) -> None:
        self.builder, self.config, self.dtype, self.inputs = b, config, dtype, inputs
        self.batch, self.tokens = b.dim(inputs["q"], 0), b.dim(inputs["q"], 1)
        self.axis = 2 if config.cache == "expanded" else 1
        # what has the cache's leading sizes; opset 19's Shape takes no float8 in ORT
        sized = "past_latent_scale" if config.cache_type == "float8" else "past_latent"
        self._past = inputs["past_key" if config.cache == "expanded" else sized]
        if config.static_cache:
            self.there = not_negative(b, b.cast(inputs["cache_lengths"], INT64))
        elif config.has_past:
            self.there = b.dim(self._past, self.axis)
        else:
            self.there = b.const([0])
        self._places: ir.Value | None = None

    def used(self, b: GraphBuilder, keys: ir.Value) -> ir.Value:
        """Which slots of a row hold tokens after the call: bool [B, L]."""
        after = b.unsqueeze(b.add(self.there, self.tokens), 1)
        return b.op("Less", b.unsqueeze(arange(b, keys), 0), after)

    def _blocks(self) -> ir.Value:
        """Paged: ids [B, max_blocks]; those of no tokens are 0."""
        b = self.builder
        size = b.dim(self._past, 1)
        table = not_negative(b, b.cast(self.inputs["block_table"], INT64))
        first = b.mul(b.unsqueeze(arange(b, b.dim(table, 1)), 0), size)
        needed = b.op("Less", first, b.unsqueeze(b.add(self.there, self.tokens), 1))
        return b.op("Where", needed, table, b.const(0))

    def places(self) -> ir.Value:
        """Where the new tokens go, for ScatterND: [B, S, 2], of expanded caches [B, H, S, 3]."""
        if self._places is None:
            self._places = self._make_places()
        return self._places

    def _make_places(self) -> ir.Value:
        b, config = self.builder, self.config
        batch = self.batch
        at = b.add(b.unsqueeze(self.there, 1), b.unsqueeze(arange(b, self.tokens), 0))  # [B, S]
        rows = b.unsqueeze(arange(b, batch), 1)  # [B, 1]
        if config.cache == "expanded":
            heads = b.const(list(range(config.num_heads)))
            shape = b.concat([batch, b.const([config.num_heads]), self.tokens], axis=0)
            parts = (b.unsqueeze(rows, 2), b.unsqueeze(heads, 0, 2), b.unsqueeze(at, 1))
            return b.concat([b.unsqueeze(b.op("Expand", part, shape), 3) for part in parts], axis=3)
        if config.paged:
            size = b.dim(self._past, 1)
            table = not_negative(b, b.cast(self.inputs["block_table"], INT64))
            block = b.op("Div", at, size)
            # a length beyond the table: GatherElements reports it
            rows, at = b.op("GatherElements", table, block, axis=1), b.op("Mod", at, size)
        else:
            rows = b.op("Expand", rows, b.concat([batch, self.tokens], axis=0))
        return b.concat([b.unsqueeze(rows, 2), b.unsqueeze(at, 2)], axis=2)

    def _put(self, past: ir.Value, new: ir.Value) -> ir.Value:
        """The cache after the call."""
        b = self.builder
        if not self.config.has_past:
            return new
        if self.config.static_cache:
            return b.op("ScatterND", past, self.places(), new)
        return b.concat([past, new], axis=self.axis)

    def _rows(self, cache: ir.Value, width: int) -> ir.Value:
        """[B, L, width] of a cache that may be paged."""
        if not self.config.paged:
            return cache
        b = self.builder
        return b.reshape(b.op("Gather", cache, self._blocks(), axis=0), [0, -1, width])

    def _clean(self, rows: ir.Value) -> ir.Value:
        """Zeros in unused slots of [B, L, ...] or [B, H, L, ...]: they may hold anything, even NaN."""
        b = self.builder
        if not self.config.static_cache:
            return rows
        used = self.used(b, b.dim(rows, self.axis))
        axes = (1, 3) if self.axis == 2 else (2,)
        return b.op("Where", b.unsqueeze(used, *axes), rows, b.const(0.0))

    def _plain(self, past: str, new: ir.Value, width: int) -> tuple[ir.Value, ir.Value]:
        """A cache of type T: after the call, and as float32 rows."""
        b = self.builder
        if self.dtype != FLOAT:
            if not self.config.has_past:  # nobody has rounded it yet: no need to read what is rounded
                return b.cast(new, self.dtype), new
            new = b.cast(new, self.dtype)
        present = self._put(self.inputs[past], new)
        rows = self._rows(present, width)
        return present, self._clean(rows if self.dtype == FLOAT else b.cast(rows, FLOAT))

    def expanded(self, key: ir.Value, value: ir.Value) -> tuple[ir.Value, ir.Value, Cached]:
        """All keys [B, H, L, Dn+Dr] and values [B, H, L, Dv] from those of the new tokens."""
        keys = self._plain("past_key", key, self.config.qk_head_dim)
        values = self._plain("past_value", value, self.config.v_head_dim)
        return keys[1], values[1], {"present_key": keys[0], "present_value": values[0]}

    def latents(self, latent: ir.Value, rope: ir.Value | None) -> tuple[ir.Value, ir.Value | None, Cached]:
        """All latents [B, L, R] and rotated keys [B, L, Dr] (or None) from those of the new tokens."""
        b, config = self.builder, self.config
        rank, width = config.kv_lora_rank, config.qk_rope_head_dim
        if config.cache == "none":
            return latent, rope, {}
        if config.packed_cache:
            assert rope is not None
            present, rows = self._plain("past_latent", b.concat([latent, rope], axis=2), rank + width)
            latents, ropes = b.split(rows, [rank, width], axis=2)
            return latents, ropes, {"present_latent": present}
        cached: Cached = {}
        if rope is not None:
            cached["present_k_rope"], rope = self._plain("past_k_rope", rope, width)
        if config.cache_type == "int8":
            latents = self._int8(latent, cached)
        elif config.cache_type == "float8":
            latents = self._float8(latent, cached)
        else:
            cached["present_latent"], latents = self._plain("past_latent", latent, rank)
        return latents, rope, cached

    def _int8(self, latent: ir.Value, cached: Cached) -> ir.Value:
        b, scale = self.builder, self.inputs["past_latent_scale"]
        codes = b.op(
            "Clip", b.op("Round", b.op("Div", latent, scale)), b.const(-float(INT8_MAX)), b.const(float(INT8_MAX))
        )
        present = self._put(self.inputs["past_latent"], b.cast(codes, ir.DataType.INT8))
        cached["present_latent"] = present
        rows = b.cast(self._rows(present, self.config.kv_lora_rank), FLOAT)
        return self._clean(b.mul(rows, scale))

    def _float8(self, latent: ir.Value, cached: Cached) -> ir.Value:
        """Codes travel as float32, which holds them exactly: few ops take float8."""
        b, rank = self.builder, self.config.kv_lora_rank
        groups = float8_groups(rank)
        grouped = [0, 0, groups, FLOAT8_GROUP]

        def split(x: ir.Value) -> ir.Value:
            """[., ., R] to [., ., groups, 128], zeros behind."""
            missing = groups * FLOAT8_GROUP - rank
            if missing:
                x = b.op("Pad", x, b.const([0, missing]), None, b.const([2]))
            return b.reshape(x, grouped)

        def join(x: ir.Value) -> ir.Value:
            return b.slice(b.reshape(x, [0, 0, groups * FLOAT8_GROUP]), 2, 0, rank)

        x = split(latent)
        largest = b.op("ReduceMax", b.op("Abs", x), b.const([-1]), keepdims=1)
        scale = b.op("Div", largest, b.const(FLOAT8_MAX))
        scale = b.op("Where", b.op("Greater", scale, b.const(0.0)), scale, b.const(1.0))
        codes = b.op("Clip", b.op("Div", x, scale), b.const(-FLOAT8_MAX), b.const(FLOAT8_MAX))
        codes = b.cast(b.cast(codes, ir.DataType.FLOAT8E4M3FN), FLOAT)
        present = self._put(b.cast(self.inputs["past_latent"], FLOAT), join(codes))
        scales = self._put(self.inputs["past_latent_scale"], b.squeeze(scale, 3))
        cached["present_latent"] = b.cast(present, ir.DataType.FLOAT8E4M3FN)
        cached["present_latent_scale"] = scales
        rows = split(self._clean(self._rows(present, rank)))
        factors = self._clean(self._rows(scales, groups))
        return join(b.mul(rows, b.unsqueeze(factors, 3)))
