"""Small hand-written mixtures of experts with a place to put something in at every point of the block."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx

from .builder import Graph, Hook
from .mla_builder import same

HIDDEN, INTER, EXPERTS, GROUPS, KEPT, TOP = 8, 6, 8, 4, 2, 3
LOWEST = float(np.finfo(np.float32).min)

#: Takes the graph, an expert's number and a value.
PerExpert = Callable[[Graph, int, str], str]


def same_of(_: Graph, __: int, x: str) -> str:
    return x


@dataclass
class Moe:
    """The layer: x [B, T, 8] to y [B, T, 8], all experts on all tokens, their weights 0 where they were not chosen.

    Attributes:
        x: what is done to the experts' tokens, router_x: to the router's.
        logits, scores, choice, weights, y: what is put in there; ids: what is done to the chosen experts' numbers.
        total: what is done to the sum that weights are divided by.
        column: what is done to one expert's weight, out: to its result.
        shared: what is done to the shared expert's result; None: there is none.
        zero: how many of the last experts give back their token; ``given``: what is done to it, ``zero_column``: to its
            weight.
        biased: the experts' projections have biases; ``gate``, ``sloped``, ``up``: what is done to those values.
        after: "softmax" or "sigmoid" of the chosen logits, which are chosen from; ``values``: what is done to them;
            ``spread``: scores are taken of all logits, with this number for those that were not chosen.
        bias: of the choice, one number an expert. fill: what the choices of groups that do not stay become.
    """

    x: Hook = same
    router_x: Hook = same
    logits: Hook = same
    scores: Hook = same
    choice: Hook = same
    ids: Hook = same
    weights: Hook = same
    total: Hook = same
    y: Hook = same
    end: Hook = same
    column: PerExpert = same_of
    hidden: PerExpert = same_of
    out: PerExpert = same_of
    shared: Hook | None = same
    zero: int = 0
    given: PerExpert = same_of
    zero_column: PerExpert = same_of
    biased: bool = False
    gate: PerExpert = same_of
    sloped: PerExpert = same_of
    up: PerExpert = same_of
    after: str = ""
    values: Hook = same
    spread: float | None = None
    bias: list[float] | None = None
    fill: float = LOWEST
    grouped: bool = True
    dims: tuple[int | str, ...] = ("B", "T")
    scale: float = 2.5
    inputs: dict[str, tuple[list[int | str], int]] = field(default_factory=dict)
    dtype: Any = np.float32

    def model(self) -> onnx.ModelProto:
        g = Graph(dtype=self.dtype)
        x = g.input("x", [*self.dims, HIDDEN])
        for name, (dims, kind) in self.inputs.items():
            g.input(name, dims, kind)
        flat = g.op("Reshape", x, g.ints(-1, HIDDEN))
        router_x, tokens = self.router_x(g, flat), self.x(g, flat)
        logits = self.logits(g, g.op("MatMul", router_x, g.weight(HIDDEN, EXPERTS)))
        if self.after and self.spread is not None:
            best, ids = g.ops("TopK", logits, g.ints(TOP), count=2)
            shape = g.op("Shape", logits)
            others = g.op("Expand", g.const(np.float32(self.spread)), shape)
            among = g.op("ScatterElements", others, self.ids(g, ids), self.values(g, best), axis=-1)
            dense = g.op("Softmax", among, axis=-1) if self.after == "softmax" else g.op("Sigmoid", among)
            return self._sum(g, x, tokens, self.weights(g, dense))
        if self.after:
            return self._end(g, x, tokens, logits, *self._by_logits(g, logits))
        scores = self.scores(g, g.op("Sigmoid", logits))
        given = self.bias if self.bias is not None else list(0.1 * g.rng.standard_normal(EXPERTS))
        choice = g.op("Add", scores, g.const(np.array(given)))
        if self.grouped:
            choice = self._masked(g, choice, self.fill)
        ids = self.ids(g, g.ops("TopK", self.choice(g, choice), g.ints(TOP), count=2)[1])
        weights = g.op("GatherElements", scores, ids, axis=-1)
        total = g.op("Add", g.op("ReduceSum", weights, g.ints(-1)), g.const(1e-20))
        weights = g.op("Div", weights, self.total(g, total))
        weights = self.weights(g, g.op("Mul", weights, g.const(self.scale)))
        return self._end(g, x, tokens, scores, ids, weights)

    def _by_logits(self, g: Graph, logits: str) -> tuple[str, str]:
        """(ids, weights) of the best logits."""
        best, ids = g.ops("TopK", logits, g.ints(TOP), count=2)
        best = self.values(g, best)
        weights = g.op("Softmax", best, axis=-1) if self.after == "softmax" else g.op("Sigmoid", best)
        return self.ids(g, ids), self.weights(g, weights)

    def _end(self, g: Graph, x: str, tokens: str, scores: str, ids: str, weights: str) -> onnx.ModelProto:
        zeros = g.op("ConstantOfShape", g.op("Shape", scores))
        return self._sum(g, x, tokens, g.op("ScatterElements", zeros, ids, weights, axis=-1))

    def _sum(self, g: Graph, x: str, tokens: str, dense: str) -> onnx.ModelProto:
        y = ""
        for expert in range(EXPERTS):
            number = g.ints(expert)
            column = self.column(g, expert, g.op("Slice", dense, number, g.ints(expert + 1), g.ints(1)))
            if expert < EXPERTS - self.zero:
                made = self.out(g, expert, self._mlp(g, tokens, expert))
            else:
                made, column = self.given(g, expert, tokens), self.zero_column(g, expert, column)
            term = g.op("Mul", made, column)
            y = term if not y else g.op("Add", y, term)
        y = self.y(g, y)
        if self.shared is not None:
            y = g.op("Add", y, self.shared(g, self._mlp(g, tokens, -1)))
        y = self.end(g, y)
        g.output("y", g.op("Reshape", y, g.op("Shape", x)), [*self.dims, HIDDEN])
        return g.model()

    @staticmethod
    def _masked(g: Graph, choice: str, fill: float = LOWEST) -> str:
        each = EXPERTS // GROUPS
        best = g.ops("TopK", g.op("Reshape", choice, g.ints(-1, GROUPS, each)), g.ints(2), count=2)[0]
        best = g.op("ReduceSum", best, g.ints(-1), keepdims=0)
        kept = g.ops("TopK", best, g.ints(KEPT), count=2)[1]
        zeros = g.op("ConstantOfShape", g.op("Shape", best))
        ones = g.op("Expand", g.const(1.0), g.op("Shape", kept))
        stays = g.op("Unsqueeze", g.op("ScatterElements", zeros, kept, ones, axis=-1), g.ints(2))
        wide = g.op("Expand", stays, g.op("Concat", g.op("Shape", best), g.ints(each), axis=0))
        wide = g.op("Reshape", wide, g.ints(-1, EXPERTS))
        return g.op("Where", g.op("Cast", wide, to=9), choice, g.const(fill))

    def _mlp(self, g: Graph, x: str, expert: int) -> str:
        gate = self.gate(g, expert, self._linear(g, x, HIDDEN, INTER))
        up = self.up(g, expert, self._linear(g, x, HIDDEN, INTER))
        hidden = g.op("Mul", g.op("Mul", gate, g.op("Sigmoid", self.sloped(g, expert, gate))), up)
        return self._linear(g, self.hidden(g, expert, hidden), INTER, HIDDEN)

    def _linear(self, g: Graph, x: str, into: int, out: int) -> str:
        y = g.op("MatMul", x, g.weight(into, out))
        return g.op("Add", y, g.weight(out)) if self.biased else y
