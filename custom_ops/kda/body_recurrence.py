"""The delta rule in standard ONNX ops: one token, or any number of tokens in chunks.

The chunked form is the one of the CPU kernel and of Kimi Linear's paper, arranged so that no exponent is ever positive
and no decay is a difference of long sums. With C tokens a chunk there are log2(C) levels; on level l the chunk falls
into blocks of 2**(l+1) tokens and a pair (i, j) of tokens belongs to the level where i lies in the second and j in the
first half of one block. Its decay exp(g_{j+1} + ... + g_i) splits at the middle of the block,

    exp(sum from the middle to i) * exp(sum from j + 1 to the middle),

so a level is one matrix product of row factors and column factors, all <= 1, and a mask that keeps its pairs. The same
levels give the inverse of I + A by blocks: X <- X - X A_l X, which is exact forward substitution on blocks and so stays
accurate for nearly collinear keys, where a Neumann series in float32 does not.

Values here have shape [..., H, R, tokens, width] with R = HV / H value heads to a query head; q and k have R = 1.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from ..common.graph_builder import GraphBuilder

#: A log decay below this makes exp() zero in float32 with every other factor; it also keeps 0 * -inf out of sums.
LOWEST_DECAY = -1e4


def one_token(
    b: GraphBuilder, q: ir.Value, k: ir.Value, v: ir.Value, g: ir.Value, beta: ir.Value, state: ir.Value
) -> tuple[ir.Value, ir.Value]:
    """One step of the recurrence, as it is defined.

    Args:
        q, k: [B, H, 1, 1, K], q times scale.  v: [B, H, R, 1, V].  g: [B, H, R, 1, K].  beta: [B, H, R, 1, 1].
        state: [B, H, R, K, V].

    Returns:
        o [B, H, R, 1, V] and the new state.
    """
    decayed = b.mul(state, b.swap_last(b.op("Exp", g), 5))
    delta = b.mul(beta, b.sub(v, b.matmul(k, decayed)))
    state = b.add(decayed, b.mul(b.swap_last(k, 5), delta))
    return b.matmul(q, state), state


def level_constants(tokens: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Which log decays to sum, and which pairs to keep, on each level of a chunk.

    Returns:
        sums: [(levels + 2) * tokens, tokens] of 0 and 1: times g gives the exponents of every level, then the sums
            from the chunk's start (inclusive) and those to its end (exclusive).
        masks: [levels, tokens, tokens] of 0 and 1.
    """
    levels = tokens.bit_length() - 1
    index = np.arange(tokens)
    row, column = index[:, None], index[None, :]
    sums = np.zeros((levels + 2, tokens, tokens), np.float32)
    masks = np.zeros((levels, tokens, tokens), np.float32)
    for level in range(levels):
        half = 1 << level
        same_half = row // half == column // half
        second = (row // half) % 2 == 1
        sums[level] = same_half & np.where(second, column <= row, column > row)
        masks[level] = second & (row // half - 1 == column // half)
    sums[levels] = column <= row
    sums[levels + 1] = column > row
    return sums.reshape(-1, tokens), masks


class Chunks:
    """Chunked evaluation; ``prepare`` needs no state, ``advance`` carries it from chunk to chunk."""

    def __init__(self, tokens: int, key_dim: int, value_dim: int) -> None:
        if tokens < 2 or tokens & (tokens - 1):
            raise ValueError(f"chunk of {tokens} tokens: expected a power of two")
        self.tokens, self.key_dim, self.value_dim = tokens, key_dim, value_dim
        self.levels = tokens.bit_length() - 1
        self.sums, self.masks = level_constants(tokens)

    def prepare(
        self, b: GraphBuilder, q: ir.Value, k: ir.Value, g: ir.Value, beta: ir.Value, rank: int
    ) -> tuple[ir.Value, ...]:
        """What depends on keys, queries and gates only.

        Args:
            q, k: [..., H, 1, C, K], q times scale.  g: [..., H, R, C, K].  beta: [..., H, R, C, 1].  rank: theirs.

        Returns:
            reads [..., H, R, 2 C, K] (keys, then queries, times their decay since the chunk's start),
            writes [..., H, R, K, C] (keys times their decay to the chunk's end, transposed),
            inverse [..., H, R, C, C], mix [..., H, R, C, C], decay [..., H, R, K, 1] of the whole chunk.
        """
        c, key_dim, levels = self.tokens, self.key_dim, self.levels
        exponents = b.matmul(b.const(self.sums), g)
        factors = b.reshape(b.op("Exp", exponents), [*[0] * (rank - 2), levels + 2, c, key_dim])
        inside, start, end = b.split(factors, [levels, 1, 1], axis=rank - 2)
        start, end = b.squeeze(start, rank - 2), b.squeeze(end, rank - 2)

        k_levels = b.mul(b.unsqueeze(k, rank - 2), inside)
        q_levels = b.mul(b.unsqueeze(q, rank - 2), inside)
        columns = b.swap_last(k_levels, rank + 1)
        beta_masks = b.mul(b.unsqueeze(beta, rank - 2), b.const(self.masks))
        a_levels = b.mul(b.matmul(k_levels, columns), beta_masks)
        mix = b.op(
            "ReduceSum", b.mul(b.matmul(q_levels, columns), b.const(self.masks)), b.const([rank - 2]), keepdims=0
        )
        mix = b.add(mix, b.mul(b.sum_last(b.mul(q, k)), b.const(np.eye(c, dtype=np.float32))))

        parts = b.split(a_levels, [1] * levels, axis=rank - 2)
        inverse = b.sub(b.const(np.eye(c, dtype=np.float32)), b.squeeze(parts[0], rank - 2))
        for part in parts[1:]:
            a = b.squeeze(part, rank - 2)
            inverse = b.sub(inverse, b.matmul(b.matmul(inverse, a), inverse))

        reads = b.concat([b.mul(k, start), b.mul(q, start)], axis=rank - 2)
        writes = b.swap_last(b.mul(k, end), rank)
        decay = b.swap_last(b.slice(start, rank - 2, c - 1, c), rank)
        return reads, writes, inverse, mix, decay

    def advance(
        self, b: GraphBuilder, prepared: tuple[ir.Value, ...], v: ir.Value, beta: ir.Value, state: ir.Value
    ) -> tuple[ir.Value, ir.Value]:
        """One chunk: v [B, H, R, C, V], state [B, H, R, K, V] to o [B, H, R, C, V] and the new state."""
        reads, writes, inverse, mix, decay = prepared
        by_keys, by_queries = b.split(b.matmul(reads, state), [self.tokens, self.tokens], axis=3)
        delta = b.matmul(inverse, b.mul(beta, b.sub(v, by_keys)))
        o = b.add(by_queries, b.matmul(mix, delta))
        return o, b.add(b.mul(state, decay), b.matmul(writes, delta))


def many_tokens(
    b: GraphBuilder,
    q: ir.Value,
    k: ir.Value,
    v: ir.Value,
    g: ir.Value,
    beta: ir.Value,
    state: ir.Value,
    *,
    heads: int,
    repeats: int,
    chunks: Chunks,
    hoist: bool,
) -> tuple[ir.Value, ir.Value]:
    """Any number of tokens: a Scan over chunks.

    Args:
        q, k: [B, T, H, 1, K], q times scale.  v: [B, T, H, R, V].  g: [B, T, H, R, K].  beta: [B, T, H, R, 1].
        state: [B, H, R, K, V].
        hoist: prepare all chunks at once before the Scan: fewer, larger ops, but memory that grows with T.

    Returns:
        o [B, T, H, R, V] and the state after the last token.
    """
    size, key_dim, value_dim = chunks.tokens, chunks.key_dim, chunks.value_dim
    tokens = b.dim(v, 1)
    # at least one chunk, so that no Scan is empty; padded tokens have g = 0, beta = 0, k = 0 and change nothing
    count = b.op("Max", b.op("Div", b.add(tokens, b.const([size - 1])), b.const([size])), b.const([1]))
    missing = b.sub(b.mul(count, b.const([size])), tokens)
    pads = b.concat([b.const([0]), missing], axis=0)

    def chunked(x: ir.Value, repeats: int, width: int) -> ir.Value:
        padded = b.op("Pad", x, pads, None, b.const([1]))
        return b.transpose(b.reshape(padded, [0, -1, size, heads, repeats, width]), [1, 0, 3, 4, 2, 5])

    q, k = chunked(q, 1, key_dim), chunked(k, 1, key_dim)
    v, g, beta = chunked(v, repeats, value_dim), chunked(g, repeats, key_dim), chunked(beta, repeats, 1)
    streams = [v, beta, *(chunks.prepare(b, q, k, g, beta, 6) if hoist else (q, k, g))]
    carried = b.value("state", ir.DataType.FLOAT)
    slices = [b.value("chunk", ir.DataType.FLOAT) for _ in streams]

    def step(inner: GraphBuilder) -> list[ir.Value]:
        v, beta, *rest = slices
        prepared = tuple(rest) if hoist else chunks.prepare(inner, rest[0], rest[1], rest[2], beta, 5)
        o, after = chunks.advance(inner, prepared, v, beta, carried)
        return [after, o]

    body = b.subgraph("chunk", [carried, *slices], step)
    state, o = b.ops("Scan", [state, *streams], 2, body=body, num_scan_inputs=len(streams))
    o = b.reshape(b.transpose(o, [1, 0, 4, 2, 3, 5]), [0, -1, heads, repeats, value_dim])
    return b.slice(o, 1, 0, tokens), state
