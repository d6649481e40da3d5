"""Layers that are nearly latent attention: each differs from the op where a proof's draws would not show it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import onnx
from onnx import TensorProto

from .builder import Graph, Hook
from .mla_builder import BOOL, LOWEST, ROPE, At, Mla, added, causal, keep, no_mask

#: Makes the truths of the keys that count, broadcast to [B, H, T, K].
Kept = Callable[[Graph, At], str]


@dataclass(frozen=True)
class Attack:
    """A layer, and where to compare what became of it.

    Attributes:
        code, words: what the refusal has; "" for a layer that may be fused, into what it was.
        sizes: numbers of the model's dims to compare at; ``scale``: the sizes of inputs.
        masked: the first sequence's padding mask is false everywhere.
    """

    layer: Mla
    code: str = ""
    words: str = ""
    sizes: tuple[Mapping[str, int], ...] = ({"B": 3, "T": 1, "P": 5}, {"B": 3, "T": 40, "P": 30})
    scale: tuple[float, ...] = (0.01, 1.0, 100.0)
    dims: Mapping[str, list[int | str]] = field(default_factory=dict)
    masked: bool = False

    def model(self) -> onnx.ModelProto:
        """The layer, some of its inputs declared with other dims."""
        model = self.layer.model()
        for value in model.graph.input:
            for dim, given in zip(value.type.tensor_type.shape.dim, self.dims.get(value.name, ()), strict=False):
                if isinstance(given, int):
                    dim.dim_value = given
                else:
                    dim.dim_param = given
        return model


# --- masks ----------------------------------------------------------------------------------------------------------


def number(graph: Graph, value: int) -> str:
    return graph.const(np.int64(value))


def through(kind: int) -> Kept:
    """Causal, by positions that went through another type."""

    def kept(graph: Graph, at: At) -> str:
        keys, queries = (
            graph.op("Cast", graph.op("Cast", places, to=kind), to=TensorProto.INT64)
            for places in (at.key_place, at.query_place)
        )
        return graph.op("LessOrEqual", keys, queries)

    return kept


def four(kept: Kept) -> Kept:
    """With axes of one for batch and heads."""
    return lambda graph, at: graph.op("Unsqueeze", kept(graph, at), graph.ints(0, 1))


def also(kept: Kept, more: Kept) -> Kept:
    return lambda graph, at: graph.op("And", kept(graph, at), more(graph, at))


def sliding(size: int, sinks: int = 0) -> Kept:
    """Causal, over the last keys, and the first ones: attention sinks."""

    def kept(graph: Graph, at: At) -> str:
        near = graph.op("Greater", at.key_place, graph.op("Sub", at.query_place, number(graph, size)))
        if sinks:
            near = graph.op("Or", near, graph.op("Less", at.key_place, number(graph, sinks)))
        return graph.op("And", causal(graph, at), near)

    return kept


def below(limit: int) -> Kept:
    """Keys from some place on count for nobody."""
    return also(causal, lambda graph, at: graph.op("Less", at.key_place, number(graph, limit)))


def ring(size: int, gap: int) -> Kept:
    """In every ring of places some do not count."""

    def kept(graph: Graph, at: At) -> str:
        place = graph.op("Mod", at.key_place, number(graph, size))
        return graph.op("And", causal(graph, at), graph.op("Less", place, number(graph, size - gap)))

    return kept


def range_of(graph: Graph, size: str) -> str:
    return graph.op("Range", number(graph, 0), graph.op("Squeeze", size), number(graph, 1))


def later_rows(graph: Graph, at: At) -> str:
    """Causal, but for the fifth sequence and those behind it."""
    row = graph.op("Reshape", range_of(graph, at.batch), graph.ints(-1, 1, 1, 1))
    return graph.op("Or", graph.op("Greater", row, number(graph, 3)), causal(graph, at))


def last_head(graph: Graph, at: At) -> str:
    """Causal, but for the last head."""
    head = graph.const(np.arange(3).reshape(1, 3, 1, 1))
    return graph.op("Or", graph.op("Equal", head, number(graph, 2)), causal(graph, at))


def padding(graph: Graph, at: At) -> str:
    """The padding mask's entry for each key, looked up by place as transformers does."""
    shape = graph.op("Concat", at.batch, at.keys, axis=0)
    rows = graph.op("Unsqueeze", range_of(graph, at.batch), graph.ints(1))
    places = [graph.op("Unsqueeze", graph.op("Expand", x, shape), graph.ints(2)) for x in (rows, at.key_place)]
    found = graph.op("GatherND", "pad", graph.op("Concat", *places, axis=2))
    return graph.op("Unsqueeze", found, graph.ints(1, 2))


def pad(*dims: int | str) -> dict[str, tuple[list[int | str], int]]:
    return {"pad": (list(dims), BOOL)}


# --- other steps ----------------------------------------------------------------------------------------------------


def turned_about(*divisors: int) -> Hook:
    """Tokens change their order in sequences that are long enough for a quotient to be 1."""

    def hook(graph: Graph, x: str) -> str:
        batch, tokens, rest = (
            graph.op("Shape", x, start=0, end=1),
            graph.op("Shape", x, start=1, end=2),
            graph.op("Shape", x, start=2),
        )
        parts = tokens
        for divisor in divisors:
            parts = graph.op("Div", parts, graph.ints(divisor))
        parts = graph.op("Add", parts, graph.ints(1))
        apart = graph.op("Reshape", x, graph.op("Concat", batch, parts, graph.ints(-1), rest, axis=0))
        return graph.op("Reshape", graph.op("Transpose", apart, perm=[0, 2, 1, 3]), graph.op("Shape", x))

    return hook


def moved_on(axis: int) -> Hook:
    """Turned round by `(B - 1) * (B - 2) * (B - 3)` places along an axis: by none in batches of up to three."""

    def hook(graph: Graph, x: str) -> str:
        batch, size = graph.op("Shape", x, start=0, end=1), graph.op("Shape", x, start=axis, end=axis + 1)
        by = graph.op("Mul", graph.op("Sub", batch, graph.ints(1)), graph.op("Sub", batch, graph.ints(2)))
        start = graph.op("Mul", by, graph.op("Sub", batch, graph.ints(3)))
        often = graph.op("Concat", *[x] * 32, axis=axis)
        return graph.op("Slice", often, start, graph.op("Add", start, size), graph.ints(axis))

    return hook


def log_length(graph: Graph, x: str) -> str:
    """Scores of queries grow with the logarithm of the length, from 4096 tokens on."""
    count = graph.op("Cast", graph.op("Shape", x, start=1, end=2), to=TensorProto.FLOAT)
    ratio = graph.op("Div", graph.op("Log", graph.op("Max", count, graph.const([4096.0]))), graph.const(np.log(4096.0)))
    return graph.op("Mul", x, ratio)


def softcap(graph: Graph, x: str) -> str:
    return graph.op("Mul", graph.op("Tanh", graph.op("Div", x, graph.const(1e5))), graph.const(1e5))


def clip(graph: Graph, x: str) -> str:
    return graph.op("Clip", x, graph.const(-1e4), graph.const(1e4))


def last(count: int) -> Hook:
    """The last entries of a cache only."""
    return lambda graph, x: graph.op("Slice", x, graph.ints(-count), graph.ints(2**31 - 1), graph.ints(1))


def first_rows(limit: int) -> Hook:
    """Zero from a token on."""

    def hook(graph: Graph, x: str) -> str:
        place = range_of(graph, graph.op("Shape", x, start=1, end=2))
        on = graph.op("Cast", graph.op("Less", place, number(graph, limit)), to=TensorProto.FLOAT)
        return graph.op("Mul", x, graph.op("Unsqueeze", on, graph.ints(0, 2)))

    return hook


LONG = ({"B": 1, "T": 2, "P": 40}, {"B": 1, "T": 2, "P": 3000}, {"B": 1, "T": 2, "P": 5000})
EQUAL = "nothing in the graph says"

ATTACKS: dict[str, Attack] = {
    # what is right must be fused, or nothing is tested
    "honest": Attack(Mla()),
    "honest cache": Attack(Mla(past=True)),
    "honest without rotation": Attack(Mla(rotated=False)),
    "honest window": Attack(Mla(past=True, mask=keep(sliding(4096))), sizes=LONG, scale=(1.0,)),
    "rotation of one sequence for all": Attack(Mla(), dims={"cos": [1, "T", ROPE], "sin": [1, "T", ROPE]}),
    # masks
    "causal with -10000": Attack(Mla(mask=keep(causal, -1e4))),
    "causal with -65504": Attack(Mla(mask=keep(causal, -65504.0))),
    "causal with -10000 in four axes": Attack(Mla(mask=keep(four(causal), -1e4))),
    "places in float16": Attack(Mla(past=True, mask=keep(through(TensorProto.FLOAT16))), sizes=LONG, scale=(1.0,)),
    "places in bfloat16": Attack(Mla(past=True, mask=keep(through(TensorProto.BFLOAT16))), sizes=LONG, scale=(1.0,)),
    "places in int16": Attack(Mla(past=True, mask=keep(through(TensorProto.INT16))), sizes=LONG, scale=(1.0,)),
    "places in float16, four axes": Attack(
        Mla(past=True, mask=keep(four(through(TensorProto.FLOAT16)))), sizes=LONG, scale=(1.0,)
    ),
    "window with sinks": Attack(Mla(past=True, mask=keep(sliding(4096, 4))), sizes=LONG, scale=(1.0,)),
    "keys up to 4000": Attack(Mla(past=True, mask=keep(below(4000))), sizes=LONG, scale=(1.0,)),
    "gaps in a ring": Attack(Mla(past=True, mask=keep(ring(5000, 100))), sizes=LONG, scale=(1.0,)),
    "another mask from the fifth sequence on": Attack(Mla(mask=keep(later_rows)), sizes=({"B": 6, "T": 9},)),
    "another mask for one head": Attack(Mla(mask=keep(last_head)), sizes=({"B": 2, "T": 9},)),
    "a padding mask": Attack(Mla(mask=keep(also(causal, padding)), inputs=pad("B", "T")), scale=(1.0,)),
    "a padding mask longer than the keys": Attack(
        Mla(mask=keep(also(causal, padding)), inputs=pad("B", "M")),
        sizes=({"B": 3, "T": 5, "M": 9}, {"B": 2, "T": 600, "M": 700}),
        scale=(1.0,),
    ),
    "nothing but padding": Attack(Mla(mask=keep(padding), inputs=pad("B", "T")), scale=(1.0,), masked=True),
    "nothing but padding, of -1e9": Attack(
        Mla(mask=keep(padding, -1e9), inputs=pad("B", "T")), scale=(1.0,), masked=True
    ),
    "a mask as long as the cache that is given": Attack(
        Mla(past=True, mask=keep(also(causal, padding)), inputs=pad("B", "P + T")), scale=(1.0,)
    ),
    "a mask as long as a cache that is made": Attack(
        Mla(past=True, moved=True, mask=keep(also(causal, padding)), inputs=pad("B", "P + T")),
        "cycle",
        "which the block gives",
    ),
    # sizes
    "latents of another sequence": Attack(Mla(rotated=False, mask=no_mask, context=["B", "K"]), "sizes", EQUAL),
    "one sequence of latents for all": Attack(Mla(rotated=False, context=[1, "T"]), "sizes", EQUAL),
    "one rotation for all tokens": Attack(Mla(), "sizes", EQUAL, dims={"cos": [1, 1, ROPE], "sin": [1, 1, ROPE]}),
    # (test_caches_of_two_lengths_give_no_result has those that differ)
    "two names for the length of the caches": Attack(
        Mla(past=True),
        dims={"past_rope": ["B", "P2", ROPE]},
        sizes=({"B": 3, "T": 1, "P": 5, "P2": 5}, {"B": 3, "T": 40, "P": 30, "P2": 30}),
    ),
    "the last 4096 of the cache": Attack(Mla(past=True, joined=last(4096), mask=no_mask), "cache", "rotary keys"),
    "tokens of queries turned about from 4000 on": Attack(Mla(q=turned_about(4000)), "proof", "Div"),
    "tokens of queries turned about from 4200 on": Attack(Mla(q=turned_about(60, 70)), "proof", "Div"),
    "latents turned about behind their norm": Attack(Mla(normed=turned_about(60, 70)), "reading|proof|keys", ""),
    "latents turned about": Attack(Mla(latent=turned_about(60, 70)), sizes=({"B": 1, "T": 4400},), scale=(1.0,)),
    "results turned about": Attack(Mla(out=turned_about(60, 70)), sizes=({"B": 1, "T": 4400},), scale=(1.0,)),
    "tokens of queries moved on from four sequences on": Attack(Mla(q=moved_on(1)), "unproved", "at batch"),
    "channels of queries moved on from four sequences on": Attack(Mla(q=moved_on(2)), "unproved", "at batch"),
    "rotary keys moved on from four sequences on": Attack(Mla(k_rope=moved_on(2)), sizes=({"B": 5, "T": 9},)),
    "results moved on from four sequences on": Attack(Mla(out=moved_on(2)), sizes=({"B": 5, "T": 9},)),
    "queries are zero from 5000 on": Attack(Mla(q=first_rows(5000)), sizes=({"B": 1, "T": 5010},), scale=(1.0,)),
    # the zeros are made outside of what is fused
    "latents are zero from 5000 on": Attack(Mla(normed=first_rows(5000)), sizes=({"B": 1, "T": 5010},), scale=(1.0,)),
    "scores that grow with the length": Attack(Mla(q=log_length), "reading|proof", ""),
    # values
    "a soft cap": Attack(Mla(scores=softcap), "softcap", "soft cap"),
    "scores within bounds": Attack(Mla(scores=clip), "none"),
    "latents within bounds": Attack(Mla(latent=clip)),
    "normed latents within bounds": Attack(Mla(normed=clip)),
    "results within bounds": Attack(Mla(out=clip)),
    "mean taken off the latents": Attack(Mla(latent=lambda g, x: g.op("Sub", x, g.op("ReduceMean", x, g.ints(-1))))),
    "NaN becomes zero": Attack(Mla(weights=lambda g, x: g.op("Where", g.op("IsNaN", x), g.const(0.0), x))),
    "factors of heads": Attack(
        Mla(scores=lambda g, x: g.op("Mul", x, g.const(np.array([1.0, 2.0, 1.0]).reshape(1, 3, 1, 1)))), "none"
    ),
    "dropout": Attack(
        Mla(weights=lambda g, x: g.ops("Dropout", x, g.const(np.float32(1e-7)), g.const(True), count=1)[0]), "none"
    ),
    "the mask counts twice": Attack(
        Mla(mask=lambda g, x, at: g.op("Add", g.op("Add", x, added(g, causal(g, at))), added(g, causal(g, at), LOWEST)))
    ),
}
