"""Small hand-written latent attention with a place to put something in at every point of the block."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto

from .builder import Graph, Hook

HIDDEN, HEADS, NOPE, ROPE, VALUE, RANK = 8, 3, 4, 2, 5, 6
LOWEST = float(np.finfo(np.float32).min)


def same(_: Graph, x: str) -> str:
    return x


@dataclass
class At:
    """What masks are made of: the names of sizes and positions, all int64."""

    batch: str  # [1]
    tokens: str  # [1]
    keys: str  # [1]
    query_place: str  # [T, 1]
    key_place: str  # [1, K]


#: Adds nodes that mask scores [B, H, T, K]: takes them and what masks are made of.
Mask = Callable[[Graph, str, At], str]


def causal(graph: Graph, at: At) -> str:
    return graph.op("LessOrEqual", at.key_place, at.query_place)


def added(graph: Graph, kept: str, least: float = LOWEST) -> str:
    return graph.op("Where", kept, graph.const(0.0), graph.const(least))


def keep(kept: Callable[[Graph, At], str], least: float = LOWEST) -> Mask:
    """A mask that is added: zero where keys are kept."""
    return lambda graph, scores, at: graph.op("Add", scores, added(graph, kept(graph, at), least))


def no_mask(_: Graph, scores: str, __: At) -> str:
    return scores


@dataclass
class Mla:
    """The layer: x [B, T, 8] to y [B, T, 8].

    Attributes:
        q, latent, normed, k_rope, cos, scores, weights, out: what is put in there.
        mask: what is done to the scores.
        context: latents and rotary keys are made of another input, of this many tokens (or this dim's name).
        past: with a cache of latents that grows; ``moved``: its tensors come from nodes, not from outside.
        rotated: with a rotation.
        joined: what is done to the joined cache of latents and of rotary keys.
    """

    q: Hook = same
    latent: Hook = same
    normed: Hook = same
    k_rope: Hook = same
    scores: Hook = same
    weights: Hook = same
    out: Hook = same
    joined: Hook = same
    mask: Mask = field(default_factory=lambda: keep(causal))
    context: list[int | str] | None = None
    past: bool = False
    moved: bool = False
    rotated: bool = True
    inputs: dict[str, tuple[list[int | str], int]] = field(default_factory=dict)
    seed: int = 0
    dtype: Any = np.float32

    def model(self) -> onnx.ModelProto:
        g = Graph(seed=self.seed, dtype=self.dtype)
        x = g.input("x", ["B", "T", HIDDEN])
        source = x if self.context is None else g.input("context", [*self.context, HIDDEN])
        if self.rotated:
            for name in ("cos", "sin"):
                g.input(name, ["B", "T", ROPE])
        for name, (dims, kind) in self.inputs.items():
            g.input(name, dims, kind)
        past = g.input("past", ["B", "P", RANK]) if self.past else ""
        past_rope = g.input("past_rope", ["B", "P", ROPE]) if self.past else ""
        if self.moved:
            past, past_rope = g.op("Neg", past), g.op("Neg", past_rope)
        q = g.op("MatMul", x, g.weight(HIDDEN, HEADS * (NOPE + ROPE)))
        q = g.op("Reshape", self.q(g, q), g.ints(0, 0, HEADS, NOPE + ROPE))
        q = g.op("Transpose", q, perm=[0, 2, 1, 3])
        q_nope, q_rope = g.ops("Split", q, g.ints(NOPE, ROPE), count=2, axis=-1)
        both = g.op("MatMul", source, g.weight(HIDDEN, RANK + ROPE))
        latent, k_rope = g.ops("Split", both, g.ints(RANK, ROPE), count=2, axis=-1)
        latent = self.normed(g, self._norm(g, self.latent(g, latent)))
        k_rope = self.k_rope(g, k_rope)
        if self.rotated:
            cos, sin = (g.op("Unsqueeze", v, g.ints(1)) for v in ("cos", "sin"))
            q_rope = self._rotate(g, q_rope, cos, sin)
            k_rope = self._rotate(g, k_rope, "cos", "sin")
        if self.past:
            latent, k_rope = (g.op("Concat", a, b, axis=1) for a, b in ((past, latent), (past_rope, k_rope)))
            g.output("present", latent, ["B", "L", RANK])
            g.output("present_rope", k_rope, ["B", "L", ROPE])
        latent, k_rope = self.joined(g, latent), self.joined(g, k_rope)
        kv = g.op("MatMul", latent, g.weight(RANK, HEADS * (NOPE + VALUE)))
        kv = g.op("Reshape", kv, g.ints(0, 0, HEADS, NOPE + VALUE))
        kv = g.op("Transpose", kv, perm=[0, 2, 1, 3])
        k_nope, v = g.ops("Split", kv, g.ints(NOPE, VALUE), count=2, axis=-1)
        head = g.op("Unsqueeze", k_rope, g.ints(1))
        shape = g.op("Concat", g.op("Shape", k_nope, start=0, end=3), g.ints(ROPE), axis=0)
        keys = g.op("Concat", k_nope, g.op("Expand", head, shape), axis=-1)
        queries = g.op("Concat", q_nope, q_rope, axis=-1)
        scores = g.op("MatMul", queries, g.op("Transpose", keys, perm=[0, 1, 3, 2]))
        scores = g.op("Mul", scores, g.const((NOPE + ROPE) ** -0.5))
        scores = self.mask(g, self.scores(g, scores), self._at(g, x, latent, past))
        weights = self.weights(g, g.op("Softmax", scores, axis=-1))
        o = g.op("Transpose", g.op("MatMul", weights, v), perm=[0, 2, 1, 3])
        o = self.out(g, g.op("Reshape", o, g.ints(0, 0, HEADS * VALUE)))
        g.output("y", g.op("MatMul", o, g.weight(HEADS * VALUE, HIDDEN)), ["B", "T", HIDDEN])
        return g.model()

    @staticmethod
    def _norm(g: Graph, x: str) -> str:
        mean = g.op("ReduceMean", g.op("Mul", x, x), g.ints(-1), keepdims=1)
        root = g.op("Sqrt", g.op("Add", mean, g.const(1e-5)))
        return g.op("Mul", g.op("Div", x, root), g.const(1 + 0.1 * g.rng.standard_normal(RANK)))

    @staticmethod
    def _rotate(g: Graph, x: str, cos: str, sin: str) -> str:
        a, b = g.ops("Split", x, g.ints(ROPE // 2, ROPE // 2), count=2, axis=-1)
        turned = g.op("Concat", g.op("Neg", b), a, axis=-1)
        return g.op("Add", g.op("Mul", x, cos), g.op("Mul", turned, sin))

    @staticmethod
    def _at(g: Graph, x: str, latent: str, past: str) -> At:
        batch, tokens = g.op("Shape", x, start=0, end=1), g.op("Shape", x, start=1, end=2)
        keys = g.op("Shape", latent, start=1, end=2)
        zero, one = g.const(np.int64(0)), g.const(np.int64(1))
        row = g.op("Range", zero, g.op("Squeeze", keys), one)
        there = g.op("Squeeze", g.op("Shape", past, start=1, end=2)) if past else zero
        end = g.op("Add", there, g.op("Squeeze", tokens))
        places = g.op("Range", there, end, one)
        return At(batch, tokens, keys, g.op("Unsqueeze", places, g.ints(1)), g.op("Unsqueeze", row, g.ints(0)))


BOOL, INT64 = TensorProto.BOOL, TensorProto.INT64
