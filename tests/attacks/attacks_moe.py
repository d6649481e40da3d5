"""Blocks that are nearly mixtures of experts of the op's kind: each differs where a proof's draws would not show it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import TensorProto

from .builder import Graph, Hook
from .moe_builder import EXPERTS, LOWEST, Moe, PerExpert


@dataclass(frozen=True)
class Attack:
    """A block, and where to compare what became of it.

    Attributes:
        code, words: what the refusal has; "" for a block that may be fused, into what it was; "none": not looked at.
        sizes: numbers of the model's dims to compare at; ``scale``: the sizes of inputs.
    """

    layer: Moe
    code: str = ""
    words: str = ""
    sizes: tuple[Mapping[str, int], ...] = ({"B": 2, "T": 5}, {"B": 3, "T": 100})
    scale: tuple[float, ...] = (0.01, 1.0, 10.0)

    def model(self) -> onnx.ModelProto:
        return self.layer.model()


def clip(low: float, high: float) -> Hook:
    return lambda graph, x: graph.op("Clip", x, graph.const(low), graph.const(high))


def times(factor: float) -> Hook:
    return lambda graph, x: graph.op("Mul", x, graph.const(factor))


def through(kind: int, back: int) -> Hook:
    """Cast there and back."""
    return lambda graph, x: graph.op("Cast", graph.op("Cast", x, to=kind), to=back)


def turned_about(*divisors: int) -> Hook:
    """Rows change their order where there are enough of them for a quotient to be 1."""

    def hook(graph: Graph, x: str) -> str:
        rows = parts = graph.op("Shape", x, start=0, end=1)
        for divisor in divisors:
            parts = graph.op("Div", parts, graph.ints(divisor))
        parts, width = graph.op("Add", parts, graph.ints(1)), graph.op("Shape", x, start=1, end=2)
        apart = graph.op("Reshape", x, graph.op("Concat", parts, graph.ints(-1), width, axis=0))
        moved = graph.op("Transpose", apart, perm=[1, 0, 2])
        return graph.op("Reshape", moved, graph.op("Concat", rows, width, axis=0))

    return hook


def first_rows(limit: int) -> Hook:
    """Zero from a row on."""

    def hook(graph: Graph, x: str) -> str:
        count = graph.op("Squeeze", graph.op("Shape", x, start=0, end=1))
        place = graph.op("Range", graph.const(np.int64(0)), count, graph.const(np.int64(1)))
        on = graph.op("Cast", graph.op("Less", place, graph.const(np.int64(limit))), to=TensorProto.FLOAT)
        return graph.op("Mul", x, graph.op("Unsqueeze", on, graph.ints(1)))

    return hook


def capacity(limit: int) -> PerExpert:
    """An expert leaves out what comes after its first so many tokens."""

    def column(graph: Graph, _: int, x: str) -> str:
        ones = graph.op("Cast", graph.op("Greater", x, graph.const(0.0)), to=TensorProto.FLOAT)
        count = graph.op("CumSum", ones, graph.const(np.int64(0)))
        room = graph.op("LessOrEqual", count, graph.const(float(limit)))
        return graph.op("Mul", x, graph.op("Cast", room, to=TensorProto.FLOAT))

    return column


def one_only(expert: int, hook: Hook) -> PerExpert:
    return lambda graph, number, x: hook(graph, x) if number == expert else x


def each(hook: Hook) -> PerExpert:
    return lambda graph, _, x: hook(graph, x)


def by_number(graph: Graph, ids: str) -> str:
    """Chosen experts in the order of their numbers, where weights belong to the order of the scores."""
    return graph.ops("TopK", ids, graph.ints(3), count=2, largest=0)[0]


def plus(number: float) -> Hook:
    return lambda graph, x: graph.op("Add", x, graph.const(number))


def bounded(high: float) -> Hook:
    return lambda graph, x: graph.op("Min", x, graph.const(high))


LONG = ({"B": 1, "T": 5}, {"B": 1, "T": 4400})
FORM = "in no form of experts"
SUM = "something else than their sum"

ATTACKS: dict[str, Attack] = {
    # what is right must be fused, or nothing is tested
    "honest": Attack(Moe()),
    "honest without groups": Attack(Moe(grouped=False)),
    "honest without a shared expert": Attack(Moe(shared=None)),
    "numbers in int32": Attack(Moe(ids=through(TensorProto.INT32, TensorProto.INT64))),
    # the router
    "a bias below the mask": Attack(Moe(fill=-65504.0, bias=[0.0, -7e4] * (EXPERTS // 2)), "groups", "-70000"),
    "experts switched off by minus infinity": Attack(Moe(bias=[0.0, -np.inf] * (EXPERTS // 2)), "groups", "-inf"),
    "a bias near the mask": Attack(Moe(fill=-65504.0, bias=[0.0, -6e4] * (EXPERTS // 2)), scale=(0.01, 1.0)),
    "a mask of minus a thousand": Attack(Moe(fill=-1e3)),
    "a bias below a mask of minus a thousand": Attack(
        Moe(fill=-1e3, bias=[0.0, -2e3] * (EXPERTS // 2)), "groups", "-2000"
    ),
    "a mask that biases may reach": Attack(Moe(fill=-1.0), "routing", "become -1: "),
    "the sum of weights bounded by Max": Attack(Moe(total=lambda g, x: g.op("Max", x, g.const(1.6)))),
    "the sum of weights bounded by Clip": Attack(Moe(total=lambda g, x: g.op("Clip", x, g.const(1e-20)))),
    "the sum of weights bounded from above": Attack(
        Moe(total=lambda g, x: g.op("Min", x, g.const(1e3))), "experts", "something else than their sum"
    ),
    "the sum of weights bounded on both sides": Attack(Moe(total=clip(1e-20, 1e3)), "experts", SUM),
    "the sum of weights bounded below zero": Attack(Moe(total=clip(-1.0, np.inf)), "experts", SUM),
    "the sum of weights bounded twice": Attack(
        Moe(total=lambda g, x: g.op("Max", g.op("Max", x, g.const(1.2)), g.const(1.4))), "experts", SUM
    ),
    "the bound under a number that is added": Attack(
        Moe(total=lambda g, x: g.op("Add", g.op("Max", x, g.const(1.6)), g.const(0.1)))
    ),
    # logits that are chosen from
    "softmax of chosen logits": Attack(Moe(after="softmax")),
    "sigmoid of chosen logits": Attack(Moe(after="sigmoid"), scale=(0.1, 1.0, 100.0)),
    "softmax of chosen logits, warmer": Attack(Moe(after="softmax", values=times(0.5)), "none"),
    "softmax of chosen logits within bounds": Attack(Moe(after="softmax", values=clip(-1e3, 1e3)), "none"),
    "softmax of logits that are chosen at other places": Attack(Moe(after="softmax", ids=by_number), "experts", FORM),
    "sigmoid of chosen logits within bounds": Attack(Moe(after="sigmoid", weights=clip(0.0, 0.999)), "experts", FORM),
    "softmax of chosen logits among minus infinities": Attack(Moe(after="softmax", spread=-np.inf)),
    "softmax of chosen logits among the lowest numbers": Attack(Moe(after="softmax", spread=LOWEST)),
    "sigmoid of chosen logits among minus infinities": Attack(Moe(after="sigmoid", spread=-np.inf)),
    "softmax of chosen logits among zeros": Attack(Moe(after="softmax", spread=0.0), "experts", FORM),
    "softmax of chosen logits among small numbers": Attack(Moe(after="softmax", spread=-50.0), "experts", FORM),
    "softmax of chosen logits at other places": Attack(
        Moe(after="softmax", spread=-np.inf, ids=by_number), "experts", FORM
    ),
    # experts without weights
    "zero experts": Attack(Moe(zero=2)),
    "all but one are zero experts": Attack(Moe(zero=EXPERTS - 1, biased=True)),
    "a zero expert counts twice": Attack(Moe(zero=2, given=one_only(7, times(2.0))), "experts|shared", ""),
    "a zero expert's weight counts twice": Attack(
        Moe(zero=2, zero_column=one_only(7, times(2.0))), "experts|shared", ""
    ),
    "zero experts within bounds": Attack(Moe(zero=2, given=each(clip(-1e4, 1e4))), "experts", ""),
    "zero experts' tokens turned about": Attack(Moe(zero=2, given=each(turned_about(60, 70))), "experts|unproved", ""),
    "zero experts leave out rows from 4000 on": Attack(Moe(zero=2, given=each(first_rows(4000))), "experts", ""),
    "experts' tokens turned about, not the zero experts'": Attack(
        Moe(zero=2, x=turned_about(60, 70)), "unproved", "Div"
    ),
    # biases, and gpt-oss's activation
    "biases": Attack(Moe(biased=True)),
    "a slope and an offset": Attack(Moe(biased=True, sloped=each(times(1.702)), up=each(plus(1.0)))),
    "a slope of its own for one expert": Attack(
        Moe(sloped=one_only(3, times(1.702))), "experts", "different activations or clamps"
    ),
    "an offset of its own for one expert": Attack(
        Moe(up=one_only(3, plus(1.0))), "experts", "different activations or clamps"
    ),
    "a slope within bounds": Attack(Moe(sloped=each(clip(-1e3, 1e3))), "experts", FORM),
    "an offset before a clamp": Attack(
        Moe(up=each(lambda g, x: clip(-0.5, 0.5)(g, plus(1.0)(g, x))), gate=each(bounded(0.5))), "experts", FORM
    ),
    "an offset after a clamp": Attack(
        Moe(up=each(lambda g, x: plus(1.0)(g, clip(-0.5, 0.5)(g, x))), gate=each(bounded(0.5)))
    ),
    "an offset that depends on the token": Attack(
        Moe(up=each(lambda g, x: g.op("Add", x, g.op("ReduceMean", x, g.ints(-1))))), "experts", FORM
    ),
    "biases that depend on the number of tokens": Attack(
        Moe(
            biased=True,
            out=each(lambda g, x: g.op("Mul", x, g.op("Cast", g.op("Shape", x, start=1, end=2), to=TensorProto.FLOAT))),
        ),
        "experts",
        FORM,
    ),
    "scores within bounds": Attack(Moe(scores=clip(0.0, 1.0)), "none"),
    "all in float64": Attack(Moe(dtype=np.float64), "router-type", "double"),
    "logits within bounds": Attack(Moe(logits=clip(-1e3, 1e3))),
    "weights within bounds": Attack(Moe(weights=clip(0.0, 1e4)), "experts", FORM),
    "numbers in int8": Attack(Moe(ids=through(TensorProto.INT8, TensorProto.INT64)), "experts", FORM),
    "numbers in float16": Attack(Moe(ids=through(TensorProto.FLOAT16, TensorProto.INT64)), "experts", FORM),
    "numbers in order": Attack(Moe(ids=by_number), "experts", FORM),
    # tokens
    "tokens turned about": Attack(Moe(x=turned_about(4000)), "unproved", "Div"),
    "tokens turned about by two quotients": Attack(Moe(x=turned_about(60, 70)), "unproved", "Div"),
    "the router's tokens turned about": Attack(Moe(router_x=turned_about(60, 70)), "unproved", "Div"),
    "numbers turned about": Attack(Moe(ids=turned_about(60, 70)), "unproved", "Div"),
    "weights turned about": Attack(Moe(weights=turned_about(60, 70)), "unproved", "Div"),
    "results turned about": Attack(Moe(y=turned_about(60, 70)), sizes=LONG, scale=(1.0,)),
    "the shared expert's results turned about": Attack(Moe(shared=turned_about(60, 70)), sizes=LONG, scale=(1.0,)),
    "tokens are zero from 4000 on": Attack(Moe(x=first_rows(4000)), sizes=LONG, scale=(1.0,)),
    "logits are zero from 4000 on": Attack(Moe(logits=first_rows(4000)), sizes=LONG, scale=(1.0,)),
    "scores are zero from 4000 on": Attack(Moe(scores=first_rows(4000)), "none"),
    "weights are zero from 4000 on": Attack(Moe(weights=first_rows(4000)), "experts", FORM),
    "no shared expert from 4000 on": Attack(Moe(shared=first_rows(4000)), sizes=LONG, scale=(1.0,)),
    "nothing from 4000 on": Attack(Moe(end=first_rows(4000)), sizes=LONG, scale=(1.0,)),
    "experts with room for 2000 tokens": Attack(Moe(column=capacity(2000)), "experts", FORM),
    # experts
    "experts within bounds": Attack(Moe(out=each(clip(-1e4, 1e4))), "experts", FORM),
    "hidden channels within bounds": Attack(Moe(hidden=each(clip(-1e4, 1e4))), "experts", FORM),
    "one expert within bounds": Attack(Moe(hidden=one_only(0, clip(-1e4, 1e4))), "experts", "7 weighted experts"),
    "one expert counts twice": Attack(Moe(column=one_only(7, times(2.0))), "experts", "7 weighted experts"),
    # the end
    "the shared expert counts twice": Attack(Moe(shared=times(2.0))),
    "all counts twice": Attack(Moe(end=times(2.0))),
    "results within bounds": Attack(Moe(y=clip(-1e4, 1e4))),
    "results in whole numbers": Attack(Moe(y=through(TensorProto.INT64, TensorProto.FLOAT)), scale=(10.0,)),
}
