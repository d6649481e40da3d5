"""The op's portable function body: the same computation in standard ONNX ops, for any ONNX runtime.

The body is specialised for one configuration, so the function carries an ``overload`` that names it. It is float32
inside whatever T is, takes any batch and any number of tokens, and uses no op whose meaning changes between opsets 18
and 27.

Two forms of the attention over a cache of latents: absorbed (queries go into the latent's space, all heads share one
key of R + Dr channels) and expanded (keys and values of every head are made). Which one does less work depends on the
number of new tokens: see :func:`absorbed_up_to`.

ONNX Runtime (1.27 to 1.32) does not survive its own inlining of an ``If`` whose condition it can compute, where that
``If`` is in a branch that is inlined too and a subgraph behind it captures a value: ``If(True) { If(True) { y =
Relu(x); If(c) { Neg(y) } } }`` crashes or loses ``y``. 1.27 does not load a model either where a branch that it inlines
has a constant of more than 127 bytes that it has folded itself. Both came up where it knew all sizes. So the body's
conditions are never constants for it (:meth:`_Body.at_most`), and there is no ``If`` in an ``If``.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ..common.function_call import attribute_type
from ..common.graph_builder import GraphBuilder
from .body_cache import Cache, Cached, arange
from .body_parts import angles, rms_norm, rotate
from .spec import ATTRIBUTES, DOMAIN, INPUTS, OP_TYPE, OUTPUTS, MlaConfig

FLOAT = ir.DataType.FLOAT
SHORT = {ir.DataType.FLOAT: "f32", ir.DataType.FLOAT16: "f16", ir.DataType.BFLOAT16: "bf16"}
OPSETS = range(18, 28)
#: Queries that attend to expanded keys at once.
QUERIES = 512
#: The first opset whose Cast knows float8.
FLOAT8_OPSET = 19


def absorbed_up_to(config: MlaConfig) -> int | None:
    """The most new tokens with which absorbing the weights takes no more products than expanding keys and values.

    A pair of a query and a key takes 2 R + Dr products absorbed and Dn + Dr + Dv expanded; expanding a key takes
    R (Dn + Dv) more. None: always; 0: never (the cache holds expanded keys).
    """
    if config.cache == "expanded":
        return 0
    wide = config.qk_nope_head_dim + config.v_head_dim
    saved = 2 * config.kv_lora_rank - wide
    return None if saved <= 0 else config.kv_lora_rank * wide // saved


class _Body:
    """Builds the body of one configuration. B, S, H, L, ...: as in spec.py."""

    def __init__(self, config: MlaConfig, dtype: ir.DataType, seq_len: int | None) -> None:
        self.config, self.dtype, self.seq_len = config, dtype, seq_len
        self.builder = GraphBuilder()
        self.inputs = {name: ir.Value(name=name) for name in INPUTS}
        self.mask: ir.Value | None = None  # float32
        self._mask_queries: ir.Value | None = None

    def wide(self, name: str) -> ir.Value:
        """An operand of type T as float32."""
        return self.inputs[name] if self.dtype == FLOAT else self.builder.cast(self.inputs[name], FLOAT)

    def queries(self, cos: ir.Value | None, sin: ir.Value | None) -> tuple[ir.Value, ir.Value | None]:
        """Scaled: nope [B, H, S, Dn] and rotated rope [B, H, S, Dr] (None where Dr is 0)."""
        b, config = self.builder, self.config
        q = b.reshape(self.wide("q"), [0, 0, config.num_heads, config.qk_head_dim])
        factor = b.const(float(config.scale))
        if config.has_q_scale:
            factor = b.mul(b.unsqueeze(self.inputs["q_scale"], 2, 3), factor)
        q = b.mul(q, factor)
        if not config.qk_rope_head_dim:
            return b.transpose(q, [0, 2, 1, 3]), None
        nope, rope = b.split(q, [config.qk_nope_head_dim, config.qk_rope_head_dim], axis=3)
        if cos is not None and sin is not None:
            rope = rotate(b, config, rope, b.unsqueeze(cos, 2), b.unsqueeze(sin, 2), rank=4)
        return b.transpose(nope, [0, 2, 1, 3]), b.transpose(rope, [0, 2, 1, 3])

    def new_tokens(self, cos: ir.Value | None, sin: ir.Value | None) -> tuple[ir.Value, ir.Value | None]:
        """Latents [B, S, R] after their norm, rotated keys [B, S, Dr]."""
        b, config = self.builder, self.config
        latent, rope = self.wide("latent"), None
        if config.packed_latent:
            latent, rope = b.split(latent, [config.kv_lora_rank, config.qk_rope_head_dim], axis=2)
        elif config.qk_rope_head_dim:
            rope = self.wide("k_rope")
        if config.has_kv_norm:
            latent = rms_norm(b, latent, self.inputs["kv_norm_weight"], config.kv_norm_eps)
        if rope is not None and cos is not None and sin is not None:
            rope = rotate(b, config, rope, cos, sin, rank=3)
        return latent, rope

    def expand(self, b: GraphBuilder, latent: ir.Value, rope: ir.Value | None) -> tuple[ir.Value, ir.Value]:
        """Keys [B, H, L, Dn+Dr] and values [B, H, L, Dv] of latents [B, L, R] and rotated keys [B, L, Dr]."""
        config = self.config
        heads, nope, wide = config.num_heads, config.qk_nope_head_dim, config.v_head_dim
        both = b.reshape(b.matmul(latent, self.wide_weight), [0, 0, heads, nope + wide])
        key, value = b.split(b.transpose(both, [0, 2, 1, 3]), [nope, wide], axis=3)
        if rope is not None:
            shared = b.op("Expand", b.unsqueeze(rope, 1), b.const([1, heads, 1, 1]))
            key = b.concat([key, shared], axis=3)
        return key, value

    def seen(
        self, b: GraphBuilder, cache: Cache, keys: ir.Value, queries: ir.Value, start: ir.Value | None
    ) -> ir.Value | None:
        """Which of ``keys`` keys the ``queries`` queries from ``start`` on see; None where it is all of them.

        Sizes are int64 [1]; bool, broadcasts to [B, H, queries, keys].
        """
        config = self.config
        parts = []
        one_after_all = self.seq_len == 1 and not config.static_cache
        if config.window or (config.causal and not one_after_all):
            at = b.reshape(arange(b, keys), [1, 1, 1, -1])
            new = b.reshape(arange(b, queries), [1, 1, -1, 1])
            there = cache.there if start is None else b.add(cache.there, start)
            position = b.add(b.reshape(there, [-1, 1, 1, 1]), new)
            if config.causal:
                parts.append(b.op("LessOrEqual", at, position))
            if config.window:
                parts.append(b.op("Greater", at, b.sub(position, b.const(config.window))))
        elif config.static_cache:
            parts.append(b.unsqueeze(cache.used(b, keys), 1, 2))
        if config.bool_mask:
            parts.append(self.mask_rows(b, self.inputs["attn_mask"], keys, queries, start))
        result = parts[0] if parts else None
        for part in parts[1:]:
            assert result is not None
            result = b.op("And", result, part)
        return result

    def mask_rows(
        self, b: GraphBuilder, mask: ir.Value, keys: ir.Value, queries: ir.Value, start: ir.Value | None
    ) -> ir.Value:
        """The part of a mask [B or 1, H or 1, S or 1, L] for some queries and the first keys."""
        if start is None:
            return mask
        if self._mask_queries is None:  # in the root: see the top
            self._mask_queries = self.builder.dim(self.inputs["attn_mask"], 2)
        first = b.op("Min", start, b.sub(self._mask_queries, b.const([1])))  # one row for all: 0
        return b.slice(b.slice(mask, 2, first, b.add(first, queries)), 3, 0, keys)

    def softmax(self, b: GraphBuilder, scores: ir.Value, seen: ir.Value | None, mask: ir.Value | None) -> ir.Value:
        """Weights [B, H, S, L] of scores [B, H, S, L]; zeros for a query that sees nothing."""
        nothing = b.const(-np.inf)
        if mask is not None:
            scores = b.add(scores, mask)
        if seen is not None:
            scores = b.op("Where", seen, scores, nothing)
        weights = b.op("Softmax", scores, axis=-1)
        if not self.config.has_mask:
            return weights
        largest = b.op("ReduceMax", scores, b.const([-1]), keepdims=1)
        return b.op("Where", b.op("Equal", largest, nothing), b.const(0.0), weights)  # NaN stays NaN

    def attention(
        self,
        b: GraphBuilder,
        cache: Cache,
        query: ir.Value,
        key: ir.Value,
        value: ir.Value,
        keys: ir.Value,
        queries: ir.Value,
        start: ir.Value | None = None,
    ) -> ir.Value:
        """Outputs [B, H, ., Dv] of the queries from ``start`` on, [B, H, ., Dn+Dr], over expanded keys and values.

        ``keys`` and ``queries``: their numbers, int64 [1].
        """
        seen = self.seen(b, cache, keys, queries, start)
        mask = None if self.mask is None else self.mask_rows(b, self.mask, keys, queries, start)
        return b.matmul(self.softmax(b, b.matmul(query, b.swap_last(key, 4)), seen, mask), value)

    def in_parts(
        self, b: GraphBuilder, cache: Cache, query: ir.Value, key: ir.Value, value: ir.Value, count: ir.Value
    ) -> ir.Value:
        """:meth:`attention` of :data:`QUERIES` queries after the other, so that the scores of all are never there.

        Where keys can be cut off at the last one that a part sees, they are.
        """
        config = self.config
        number, going = b.value("part", ir.DataType.INT64, []), b.value("going", ir.DataType.BOOL, [])
        done = b.value("done", FLOAT, [None, config.num_heads, None, config.v_head_dim])

        def part(inner: GraphBuilder) -> list[ir.Value]:
            start = inner.mul(inner.unsqueeze(number, 0), inner.const([QUERIES]))
            stop = inner.op("Min", inner.add(start, inner.const([QUERIES])), cache.tokens)
            keys, values, end = key, value, count
            if config.causal and not config.static_cache:
                end = inner.add(cache.there, stop)
                keys, values = (inner.slice(y, 2, 0, end) for y in (key, value))
            queries = inner.slice(query, 2, start, stop)
            o = self.attention(inner, cache, queries, keys, values, end, inner.sub(stop, start), start)
            return [inner.op("Identity", going), inner.concat([done, o], axis=2)]

        body = b.subgraph("queries", [number, going, done], part)
        rounded = b.add(cache.tokens, b.const([QUERIES - 1]))
        parts = b.squeeze(b.op("Div", rounded, b.const([QUERIES])), 0)
        rest = b.const([config.num_heads, 0, config.v_head_dim])
        shape = b.concat([cache.batch, rest], axis=0)
        nothing = b.op("ConstantOfShape", shape, value=ir.tensor(np.zeros(1, np.float32)))
        return b.ops("Loop", [parts, None, nothing], 1, body=body)[0]

    def over_keys(
        self, b: GraphBuilder, cache: Cache, query: ir.Value, key: ir.Value, value: ir.Value, count: ir.Value
    ) -> ir.Value:
        """The attention of all queries over all ``count`` keys, at once or in parts."""

        def at_once(g: GraphBuilder) -> ir.Value:
            return self.attention(g, cache, query, key, value, count, cache.tokens)

        def in_parts(g: GraphBuilder) -> ir.Value:
            return self.in_parts(g, cache, query, key, value, count)

        if self.seq_len is not None:
            return at_once(b) if self.seq_len <= QUERIES else in_parts(b)
        if b is not self.builder:  # in a branch already
            return in_parts(b)
        branches = {
            "then_branch": b.subgraph("at_once", [], lambda g: [at_once(g)]),
            "else_branch": b.subgraph("in_parts", [], lambda g: [in_parts(g)]),
        }
        return b.ops("If", [self.at_most(cache, QUERIES)], 1, **branches)[0]

    def attend(self) -> tuple[ir.Value, Cached]:
        """Outputs [B, H, S, Dv] and the caches after the call."""
        b, config = self.builder, self.config
        cos, sin = angles(b, config, self.inputs) if config.rope != "none" else (None, None)
        nope, rope = self.queries(cos, sin)
        latent, key_rope = self.new_tokens(cos, sin)
        self.wide_weight = self.wide("kv_b_weight")
        cache = Cache(b, config, self.dtype, self.inputs)
        if config.has_mask and not config.bool_mask:
            self.mask = b.cast(self.inputs["attn_mask"], FLOAT)
        if config.cache == "expanded":
            key, value, cached = cache.expanded(*self.expand(b, latent, key_rope))
            query = nope if rope is None else b.concat([nope, rope], axis=3)
            return self.over_keys(b, cache, query, key, value, b.dim(key, 2)), cached
        latents, key_ropes, cached = cache.latents(latent, key_rope)
        count = b.dim(latents, 1)

        def absorbed(inner: GraphBuilder) -> list[ir.Value]:
            to_key, to_value = self.weights_of(inner)
            query = inner.matmul(nope, to_key)
            keys, width = latents, config.kv_lora_rank
            if rope is not None and key_ropes is not None:
                query, keys = inner.concat([query, rope], axis=3), inner.concat([latents, key_ropes], axis=2)
                width += config.qk_rope_head_dim
            heads = inner.const([config.num_heads])
            rows = inner.mul(cache.tokens, heads)

            def shaped(value: ir.Value, *dims: ir.Value) -> ir.Value:
                # no -1: with an axis of size zero there is nothing to tell its size by
                return inner.op("Reshape", value, inner.concat([cache.batch, *dims], axis=0), allowzero=1)

            flat = shaped(query, rows, inner.const([width]))
            scores = shaped(inner.matmul(flat, inner.swap_last(keys, 3)), heads, cache.tokens, count)
            seen = self.seen(inner, cache, count, cache.tokens, None)
            weights = self.softmax(inner, scores, seen, self.mask)
            o = inner.matmul(shaped(weights, rows, count), latents)
            return [inner.matmul(shaped(o, heads, cache.tokens, inner.const([config.kv_lora_rank])), to_value)]

        def expanded(inner: GraphBuilder) -> list[ir.Value]:
            key, value = self.expand(inner, latents, key_ropes)
            query = nope if rope is None else inner.concat([nope, rope], axis=3)
            return [self.over_keys(inner, cache, query, key, value, count)]

        most = absorbed_up_to(config)
        if most is None or (self.seq_len is not None and self.seq_len <= most):
            return absorbed(b)[0], cached
        if self.seq_len is not None:
            return expanded(b)[0], cached
        branches = {
            "then_branch": b.subgraph("absorbed", [], absorbed),
            "else_branch": b.subgraph("expanded", [], expanded),
        }
        return b.ops("If", [self.at_most(cache, most)], 1, **branches)[0], cached

    def at_most(self, cache: Cache, most: int) -> ir.Value:
        """Are there at most so many new tokens? A condition that no optimizer can fold: see the top."""
        b = self.builder
        nothing = b.cast(b.slice(self.inputs["q"], 2, 0, 0), ir.DataType.BOOL)
        zero = b.dim(b.op("NonZero", nothing), 1)  # what is not known before the run
        return b.op("LessOrEqual", b.squeeze(b.add(cache.tokens, zero), 0), b.const(most))

    def weights_of(self, b: GraphBuilder) -> tuple[ir.Value, ir.Value]:
        """For the absorbed form: latent to keys [H, Dn, R], latent to values [H, R, Dv]."""
        config = self.config
        nope, wide = config.qk_nope_head_dim, config.v_head_dim
        weight = b.reshape(self.wide_weight, [config.kv_lora_rank, config.num_heads, nope + wide])
        key, value = b.split(weight, [nope, wide], axis=2)
        return b.transpose(key, [1, 2, 0]), b.transpose(value, [1, 0, 2])

    def build(self) -> list[ir.Value]:
        """Add all nodes; returns the function's outputs."""
        b, config = self.builder, self.config
        o, cached = self.attend()
        o = b.transpose(o, [0, 2, 1, 3])
        if config.gate_activation == "sigmoid":
            o = b.mul(o, b.unsqueeze(b.op("Sigmoid", self.wide("gate")), 3))
        o = b.reshape(o, [0, 0, config.num_heads * config.v_head_dim])
        results = {"o": o if self.dtype == FLOAT else b.cast(o, self.dtype)}
        nothing = b.const(np.zeros(0, np.float32))
        for name in formal_outputs(config)[1:]:
            value = cached[name] if name in config.output_names() else b.cast(nothing, self.dtype)
            # A function's output must not be an input of it. Large caches are not copied otherwise.
            results[name] = b.op("Identity", value) if value.producer() is None else value
        # Up to the last output that is asked for: a call must name as many outputs as its function has, and trailing
        # omitted ones are lost when a model is written.
        for name, output in results.items():
            output.name = name
        return list(results.values())


def overload_name(config: MlaConfig, dtype: ir.DataType, *, seq_len: int | None = None) -> str:
    """The overload of the function that :func:`build_function` builds for the same arguments."""
    most = absorbed_up_to(config)
    if seq_len == 1:
        form = "-t1"
    elif seq_len is None or most is None:
        form = ""
    elif seq_len <= most:
        form = "-few"
    else:
        form = "-many" if seq_len <= QUERIES else "-long"
    return f"{config.overload()}-{SHORT[dtype]}{form}"


def formal_outputs(config: MlaConfig) -> tuple[str, ...]:
    """Outputs of the function, and of every call of it: those of the spec up to the last one asked for."""
    names = tuple(OUTPUTS)
    return names[: 1 + names.index(config.output_names()[-1])]


def build_function(
    config: MlaConfig, opset: int, dtype: ir.DataType = FLOAT, *, seq_len: int | None = None
) -> ir.Function:
    """The function ``deltafuse::LatentAttention`` for one configuration.

    Args:
        config: the call.
        opset: of the model that will hold the function, 18 to 27 (a float8 cache: from 19).
        dtype: element type of T: FLOAT, FLOAT16 or BFLOAT16.
        seq_len: new tokens of every call where that is known: the form of the attention is then chosen here; None
            chooses at run time.

    Returns:
        A function with all formal inputs of the spec (absent ones are unused) and its outputs up to the last one that
        the configuration asks for (an earlier one that is not asked for is an empty tensor).

    Raises:
        ValueError: the configuration, the opset or the dtype is not one the op defines.
    """
    refused = config.check()
    if refused is not None:
        raise ValueError(str(refused))
    if opset not in OPSETS:
        raise ValueError(f"opset {opset}: the body is written for {OPSETS[0]} to {OPSETS[-1]}")
    if config.cache_type == "float8" and opset < FLOAT8_OPSET:
        raise ValueError(f"opset {opset}: a float8 cache needs opset {FLOAT8_OPSET} or newer")
    if dtype not in SHORT:
        raise ValueError(f"dtype {dtype!r}: expected one of FLOAT, FLOAT16, BFLOAT16")
    body = _Body(config, dtype, seq_len)
    outputs = body.build()
    graph = body.builder.graph(list(body.inputs.values()), outputs, opset)
    declared = [ir.Attr(name, attribute_type(getattr(config, name)), None) for name in ATTRIBUTES]
    overload = overload_name(config, dtype, seq_len=seq_len)
    return ir.Function(DOMAIN, OP_TYPE, overload, graph=graph, attributes=declared)
