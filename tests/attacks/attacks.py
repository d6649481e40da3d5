"""Layers that are nearly KDA: each differs from it where a proof on drawn inputs would not look by itself.

Every one of them was fused once, or is the next best way to write the same. Each is named for what it does, and comes
with the code that its refusal has and words that its reason must have.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import onnx
from onnx import TensorProto, helper

from .builder import Graph, Hook, Layer, l2norm


@dataclass(frozen=True)
class Attack:
    """``beyond``: lengths to compare at beside the usual ones; ``states``: the size of the initial states."""

    layer: Layer
    words: str
    code: str = "proof"
    beyond: tuple[int, ...] = ()
    states: float = 1.0


def raw(_: Graph, x: str) -> str:
    return x


def clip(low: float, high: float) -> Hook:
    return lambda graph, x: graph.op("Clip", x, graph.const(low), graph.const(high))


def unary(*kinds: str) -> Hook:
    def hook(graph: Graph, x: str) -> str:
        for kind in kinds:
            x = graph.op(kind, x)
        return x

    return hook


def softcap(limit: float) -> Hook:
    """limit * tanh(x / limit)"""
    return lambda graph, x: graph.op(
        "Mul", graph.op("Tanh", graph.op("Div", x, graph.const(limit))), graph.const(limit)
    )


def bound(limit: float, *, upper: bool) -> Hook:
    """min(x, limit) or max(x, limit), by |y| = sqrt(y^2)."""

    def hook(graph: Graph, x: str) -> str:
        apart = graph.op("Pow", graph.op("Sub", x, graph.const(limit)), graph.const(2.0))
        both = graph.op("Add", x, graph.const(limit))
        return graph.op("Mul", graph.op("Sub" if upper else "Add", both, graph.op("Sqrt", apart)), graph.const(0.5))

    return hook


def steep(graph: Graph, x: str) -> str:
    """x below 3, else 0, by a sigmoid."""
    below = graph.op("Mul", graph.op("Sub", graph.const(3.0), x), graph.const(40.0))
    return graph.op("Mul", x, graph.op("Sigmoid", below))


def zero_large(graph: Graph, x: str) -> str:
    return graph.op("Where", graph.op("Greater", graph.op("Abs", x), graph.const(50.0)), graph.const(0.0), x)


def turned_about(*divisors: int) -> Hook:
    """Tokens change their order in sequences that are long enough for a quotient to be 1."""

    def hook(graph: Graph, x: str) -> str:
        batch, parts, rest = (graph.op("Shape", x, start=s, end=e) for s, e in ((0, 1), (1, 2), (2, 4)))
        for divisor in divisors:
            parts = graph.op("Div", parts, graph.ints(divisor))
        parts = graph.op("Add", parts, graph.ints(1))
        apart = graph.op("Reshape", x, graph.op("Concat", batch, parts, graph.ints(-1), rest, axis=0))
        return graph.op("Reshape", graph.op("Transpose", apart, perm=[0, 2, 1, 3, 4]), graph.op("Shape", x))

    return hook


def norm_by_square(graph: Graph, x: str) -> str:
    squares = graph.op("ReduceSum", graph.op("Mul", x, x), graph.ints(-1), keepdims=1)
    return graph.op("Div", x, graph.op("Add", squares, graph.const(1e-6)))


def norm_by_logarithm(graph: Graph, x: str) -> str:
    squares = graph.op("Add", graph.op("ReduceSumSquare", x, graph.ints(-1), keepdims=1), graph.const(1e-6))
    return graph.op("Mul", x, graph.op("Exp", graph.op("Mul", graph.op("Log", squares), graph.const(-0.5))))


def clipped_norm(graph: Graph, x: str) -> str:
    return l2norm(graph, clip(-20.0, 20.0)(graph, x))


def _size(graph: Graph, axis: int) -> str:
    return graph.op("Shape", "x", start=axis, end=axis + 1)


def _positions(graph: Graph, axis: int = 1) -> str:
    zero, one = graph.const(np.array(0, np.int64)), graph.const(np.array(1, np.int64))
    return graph.op("Range", zero, graph.op("Squeeze", _size(graph, axis)), one)


def before(limit: int, shape: tuple[int, ...], axis: int = 1) -> Hook:
    """x at positions (or rows) below the limit, else 0."""

    def hook(graph: Graph, x: str) -> str:
        on = graph.op("Less", _positions(graph, axis), graph.const(np.array(limit, np.int64)))
        return graph.op("Mul", x, graph.op("Reshape", graph.op("Cast", on, to=graph.kind), graph.ints(*shape)))

    return hook


def forget_every_256(graph: Graph, g: str) -> str:
    within = graph.op("Mod", _positions(graph), graph.const(np.array(256, np.int64)))
    last = graph.op("Cast", graph.op("Greater", within, graph.const(np.array(254, np.int64))), to=graph.kind)
    return graph.op("Sub", g, graph.op("Mul", graph.op("Reshape", last, graph.ints(1, -1, 1, 1)), graph.const(50.0)))


def _table(size: int, live: int) -> np.ndarray:
    return (np.arange(size) < live).astype(np.float32)


def table_by_slice(graph: Graph, beta: str) -> str:
    table = graph.const(_table(4096, 200).reshape(-1, 1))
    return graph.op("Mul", beta, graph.op("Slice", table, graph.ints(0), _size(graph, 1), graph.ints(0)))


def table_by_gather(graph: Graph, beta: str) -> str:
    return graph.op("Mul", beta, graph.op("Gather", graph.const(_table(4096, 200).reshape(-1, 1)), _positions(graph)))


def table_of_rows(graph: Graph, beta: str) -> str:
    table = graph.const(_table(8, 2).reshape(-1, 1, 1))
    return graph.op("Mul", beta, graph.op("Slice", table, graph.ints(0), _size(graph, 0), graph.ints(0)))


def zeros_from_1000(graph: Graph, beta: str) -> str:
    """Cut off what is beyond 1000 tokens, and pad it with zeros."""
    more = graph.op("Max", graph.op("Sub", _size(graph, 1), graph.ints(1000)), graph.ints(0))
    kept = graph.op("Slice", beta, graph.ints(0), graph.op("Sub", _size(graph, 1), more), graph.ints(1))
    return graph.op("Pad", kept, graph.op("Concat", graph.ints(0, 0, 0, 0), more, graph.ints(0), axis=0))


def zeros_in_whole_blocks(graph: Graph, beta: str) -> str:
    """Zeros in all complete blocks of 256 tokens."""
    whole = graph.op("Mul", graph.op("Div", _size(graph, 1), graph.ints(256)), graph.ints(256))
    kept = graph.op("Slice", beta, whole, graph.ints(99999), graph.ints(1))
    return graph.op("Pad", kept, graph.op("Concat", graph.ints(0), whole, graph.ints(0, 0, 0, 0), axis=0))


def longer_than(limit: int, inner: Callable[[Graph, str], onnx.NodeProto], apart: bool = True) -> Hook:
    """An If on the length: the node that ``inner`` makes beyond the limit, else the value itself."""

    def hook(graph: Graph, x: str) -> str:
        size = graph.op("Sub", _size(graph, 1), graph.ints(limit)) if apart else _size(graph, 1)
        longer = graph.op("Squeeze", graph.op("Greater", size, graph.ints(0 if apart else limit)))
        node = inner(graph, x)
        other = helper.make_node("Identity", [x], ["else_out"])
        then_branch, else_branch = (
            helper.make_graph([n], n.output[0], [], [helper.make_tensor_value_info(n.output[0], graph.kind, None)])
            for n in (node, other)
        )
        return graph.op("If", longer, then_branch=then_branch, else_branch=else_branch)

    return hook


def _nothing(graph: Graph, x: str) -> onnx.NodeProto:
    return helper.make_node("Sub", [x, x], ["then_out"])


def _clipped(low: float, high: float) -> Callable[[Graph, str], onnx.NodeProto]:
    return lambda graph, x: helper.make_node("Clip", [x, graph.const(low), graph.const(high)], ["then_out"])


def through(*kinds: int) -> Hook:
    """Cast to these types in turn."""

    def hook(graph: Graph, x: str) -> str:
        for kind in kinds:
            x = graph.op("Cast", x, to=kind)
        return x

    return hook


def tiled(graph: Graph, x: str) -> str:
    """Heads 0, 1, 0, 1 where KDA's are 0, 0, 1, 1."""
    return graph.op("Tile", x, graph.ints(1, 1, 2, 1))


BARE = Layer(conv=False, norm_qk=None, scale=1.0)
FLOAT, FP8 = TensorProto.FLOAT, TensorProto.FLOAT8E4M3FN

ATTACKS: dict[str, Attack] = {
    # what moves from a length on: the probe behind a bound fails (4003 is odd), or no bound is named (60 * 70)
    "tokens_turned_about": Attack(Layer(norm_qk=None, q=turned_about(4000)), "Div", beyond=(4400,)),
    "tokens_turned_about_by_two": Attack(Layer(norm_qk=None, v=turned_about(60, 70)), "Div", beyond=(4400,)),
    # what random inputs never leave: rates in [0, 1], decays below 0, keys of length one
    "rate_clipped_to_0_1": Attack(Layer(beta=clip(0.0, 1.0)), "Clip"),
    "rate_by_relu": Attack(Layer(beta=unary("Relu")), "Relu"),
    "rate_by_abs": Attack(Layer(beta=unary("Abs")), "Abs"),
    "decay_by_abs": Attack(Layer(decay=unary("Abs", "Neg")), "Abs"),
    "decay_by_min": Attack(Layer(decay=lambda m, g: m.op("Min", g, m.const(0.0))), "Min"),
    "decay_by_clip": Attack(Layer(decay=clip(-1e4, 0.0)), "Clip"),
    "norm_by_square": Attack(Layer(norm_qk=norm_by_square, conv=False), "Div"),
    "norm_by_logarithm": Attack(Layer(norm_qk=norm_by_logarithm), "Log"),
    "clip_before_the_norm": Attack(Layer(norm_qk=clipped_norm, conv=False), "Clip"),
    "clip_before_the_norm_behind_conv": Attack(Layer(norm_qk=clipped_norm), "Clip"),
    # clamps beyond the values that are drawn
    "value_clipped": Attack(Layer(v=clip(-10.0, 10.0)), "Clip"),
    "value_clipped_without_conv": Attack(Layer(v=clip(-10.0, 10.0), conv=False), "Clip"),
    "output_clipped": Attack(Layer(o=clip(-50.0, 50.0)), "Clip", states=300.0),
    "initial_state_clipped": Attack(Layer(state=clip(-200.0, 200.0)), "Clip", states=300.0),
    "carried_state_clipped": Attack(Layer(carried=clip(-200.0, 200.0)), "Clip", states=300.0),
    "large_values_dropped": Attack(Layer(v=zero_large, conv=False), "Abs|Greater|Where"),
    "value_softcap": Attack(Layer(v=softcap(1000.0), conv=False), "Tanh"),
    "value_softcap_1e9": Attack(Layer(v=softcap(1e9), conv=False), "Tanh"),
    "query_softcap": Attack(replace(BARE, q=softcap(200.0)), "Tanh"),
    "state_softcap": Attack(Layer(state=softcap(1e7)), "Tanh", states=1e6),
    "output_softcap": Attack(Layer(o=softcap(1e4)), "Tanh", states=3e4),
    # clamps without a clamp
    "rate_at_most_1.2": Attack(Layer(beta=bound(1.2, upper=True)), "Sqrt"),
    "rate_at_least_-0.06": Attack(Layer(beta=bound(-0.06, upper=False)), "Sqrt"),
    "decay_at_most_0.06": Attack(Layer(decay=bound(0.06, upper=True)), "Sqrt"),
    "query_at_most_5": Attack(replace(BARE, q=bound(5.0, upper=True)), "Sqrt"),
    "key_switch": Attack(replace(BARE, k=steep), "Sigmoid"),
    "key_switch_behind_conv": Attack(Layer(k=steep, norm_qk=None, scale=0.1), "Sigmoid"),
    # positions and rows
    "rate_of_100_tokens": Attack(Layer(rate=before(100, (1, -1, 1))), "positions or lengths"),
    "rate_of_256_tokens": Attack(Layer(rate=before(256, (1, -1, 1))), "positions or lengths"),
    "value_of_200_tokens": Attack(Layer(v=before(200, (1, -1, 1, 1))), "positions or lengths"),
    "rate_of_two_rows": Attack(Layer(rate=before(2, (-1, 1, 1), axis=0)), "positions or lengths"),
    "forget_every_256": Attack(Layer(g=forget_every_256), "positions or lengths"),
    "table_by_slice": Attack(Layer(rate=table_by_slice), "positions or lengths"),
    "table_by_gather": Attack(Layer(rate=table_by_gather), "positions or lengths"),
    "table_of_rows": Attack(Layer(rate=table_of_rows), "positions or lengths"),
    "counter_200": Attack(Layer(live=200), "positions or lengths"),
    "counter_3000": Attack(Layer(live=3000), "positions or lengths", beyond=(3300,)),
    "zeros_from_1000": Attack(Layer(rate=zeros_from_1000), "sizes|tokens|lengths", "unproved|proof", beyond=(1300,)),
    "zeros_in_whole_blocks": Attack(Layer(rate=zeros_in_whole_blocks), "sizes|tokens|lengths", "unproved|proof"),
    # branches
    "if_longer_than_600": Attack(Layer(rate=longer_than(600, _nothing, apart=False)), "If", beyond=(700,)),
    "if_longer_by_600": Attack(Layer(rate=longer_than(600, _nothing)), "If", beyond=(700,)),
    "if_query_clipped": Attack(replace(BARE, q=longer_than(-1, _clipped(-5.0, 5.0))), "If"),
    "if_value_clipped": Attack(Layer(v=longer_than(-1, _clipped(-3e6, 3e6))), "If"),
    "if_rate_clipped": Attack(Layer(beta=longer_than(-1, _clipped(-0.06, 1.11))), "If"),
    # random, rounded, or in another order
    "value_dropout": Attack(Layer(v=unary("Dropout"), conv=False), "Dropout"),
    "value_through_float8": Attack(Layer(v=through(FP8, FLOAT), conv=False), "Cast"),
    "value_through_int32": Attack(Layer(v=through(TensorProto.INT32, FLOAT), conv=False), "Cast|graph input"),
    "heads_tiled": Attack(Layer(heads=4, repeat=tiled), "differs", "mismatch"),
}
