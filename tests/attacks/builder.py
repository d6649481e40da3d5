"""Small hand-written KDA layers with a place to put something in at every point of the block."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

#: Takes a value's name, adds nodes, gives the name of the value to go on with.
Hook = Callable[["Graph", str], str]


class Graph:
    """A graph in the making: every method adds something and gives back the name of what it made."""

    def __init__(self, prefix: str = "", dtype: Any = np.float32, seed: int = 0) -> None:
        self.prefix, self.dtype = prefix, np.dtype(dtype)
        self.rng = np.random.default_rng(seed)
        self.nodes: list[onnx.NodeProto] = []
        self.constants: dict[str, onnx.TensorProto] = {}
        self.inputs: list[onnx.ValueInfoProto] = []
        self.outputs: list[onnx.ValueInfoProto] = []

    def const(self, value: Any) -> str:
        """A constant; floats take the graph's type."""
        array = np.asarray(value)
        if array.dtype.kind == "f":
            array = array.astype(self.dtype)
        name = f"{self.prefix}c{len(self.constants)}"
        self.constants[name] = numpy_helper.from_array(array, name)
        return name

    def ints(self, *values: int) -> str:
        """A constant vector of int64."""
        return self.const(np.array(values, np.int64))

    def weight(self, *shape: int, size: float | None = None) -> str:
        """Random weights."""
        return self.const(self.rng.standard_normal(shape) * (shape[0] ** -0.5 if size is None else size))

    def ops(self, kind: str, *inputs: str, count: int, **attributes: Any) -> list[str]:
        """A node with several outputs."""
        names = [f"{self.prefix}v{len(self.nodes)}_{i}" for i in range(count)]
        self.nodes.append(helper.make_node(kind, inputs, names, **attributes))
        return names

    def op(self, kind: str, *inputs: str, **attributes: Any) -> str:
        """A node with one output."""
        return self.ops(kind, *inputs, count=1, **attributes)[0]

    def input(self, name: str, dims: list[int | str] | None, kind: int | None = None) -> str:
        """A graph input, of the graph's float type by default."""
        self.inputs.append(helper.make_tensor_value_info(name, self.kind if kind is None else kind, dims))
        return name

    def output(self, name: str, source: str, dims: list[int | str] | None, kind: int | None = None) -> None:
        """A graph output that hands on a value."""
        self.nodes.append(helper.make_node("Identity", [source], [name]))
        self.outputs.append(helper.make_tensor_value_info(name, self.kind if kind is None else kind, dims))

    @property
    def kind(self) -> int:
        """The ONNX type of the graph's floats."""
        return int(helper.np_dtype_to_tensor_dtype(self.dtype))

    def body(self) -> onnx.GraphProto:
        """The graph as a subgraph, its constants as nodes."""
        constants = [helper.make_node("Constant", [], [name], value=t) for name, t in self.constants.items()]
        return helper.make_graph([*constants, *self.nodes], f"{self.prefix}body", self.inputs, self.outputs)

    def model(self) -> onnx.ModelProto:
        """The finished model, opset 20."""
        graph = helper.make_graph(self.nodes, "layer", self.inputs, self.outputs, list(self.constants.values()))
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
        onnx.checker.check_model(model)
        return model


def l2norm(graph: Graph, x: str, eps: float = 1e-6) -> str:
    """x / sqrt(sum(x^2) + eps) over the last axis."""
    squares = graph.op("ReduceSum", graph.op("Mul", x, x), graph.ints(-1), keepdims=1)
    return graph.op("Div", x, graph.op("Sqrt", graph.op("Add", squares, graph.const(eps))))


def rmsnorm(graph: Graph, x: str) -> str:
    """x / sqrt(mean(x^2) + eps) over the last axis, times a weight of 8 channels."""
    mean = graph.op("ReduceMean", graph.op("Mul", x, x), graph.ints(-1), keepdims=1)
    root = graph.op("Sqrt", graph.op("Add", mean, graph.const(1e-5)))
    weight = graph.const(1 + 0.1 * graph.rng.standard_normal(8))
    return graph.op("Mul", graph.op("Mul", x, graph.op("Reciprocal", root)), weight)


def sigmoid(graph: Graph, x: str) -> str:
    return graph.op("Sigmoid", x)


def delta_step(graph: Graph, state: str, q: str, k: str, v: str, g: str, beta: str) -> tuple[str, str]:
    """One token of the recurrence: (the state after it, the output)."""
    column, row = graph.ints(-1), graph.ints(-2)
    key = graph.op("Unsqueeze", k, column)
    decayed = graph.op("Mul", state, graph.op("Unsqueeze", graph.op("Exp", g), column))
    known = graph.op("ReduceSum", graph.op("Mul", decayed, key), row, keepdims=0)
    update = graph.op("Mul", graph.op("Sub", v, known), graph.op("Unsqueeze", beta, column))
    new = graph.op("Add", decayed, graph.op("Mul", key, graph.op("Unsqueeze", update, row)))
    read = graph.op("Mul", new, graph.op("Unsqueeze", q, column))
    return new, graph.op("ReduceSum", read, row, keepdims=0)


@dataclass(frozen=True)
class Layer:
    """A KDA layer with heads of 8 channels over any number of tokens: x [B, T, 16], S0 [B, H, 8, 8] -> y, S1.

    The hooks named after a value stand behind it: q, k, v before their norm, g and beta (``rate``) where they enter the
    recurrence, z before the output gate's sigmoid, the initial state and the recurrence's output. ``decay`` makes the
    log decay from the raw gate [B, T, H * 8] and ``beta`` the rate from the raw [B, T, H].
    """

    conv: bool = True
    heads: int = 2
    repeat: Hook | None = None  # q and k have ``heads // 2`` heads; this makes them ``heads``
    joined: bool = False  # q, k and v are joined and split again behind their linear layers
    scale: float = 8**-0.5
    norm_qk: Hook | None = l2norm
    norm_o: Hook | None = rmsnorm
    gated: bool = True
    q: Hook | None = None
    k: Hook | None = None
    v: Hook | None = None
    g: Hook | None = None
    rate: Hook | None = None
    z: Hook | None = None
    state: Hook | None = None
    carried: Hook | None = None  # the state within the Scan, from token to token
    o: Hook | None = None
    decay: Hook | None = None
    beta: Hook = sigmoid
    tap: str = ""  # which of q, k, v, g, beta, o is a graph output "tap" as well
    live: int = 0  # within the Scan, beta is zero from this token on
    dtype: Any = np.float32

    def graph(self) -> Graph:
        """The layer, open for more nodes and outputs."""
        graph = Graph(dtype=self.dtype)
        graph.input("x", ["B", "T", 16])
        graph.input("S0", ["B", self.heads, 8, 8])
        values = self._operands(graph)
        last, out = self._scan(graph, _apply(graph, self.state, "S0"), values)
        values["o"] = out = _apply(graph, self.o, out)
        if self.tap:
            dims: list[int | str] = ["B", "T", self.heads, 8]
            graph.output("tap", values[self.tap], dims[: 3 if self.tap == "beta" else 4])
        out = _apply(graph, self.norm_o, out)
        if self.gated:
            z = _heads(graph, _linear(graph, 8 * self.heads))
            out = graph.op("Mul", out, sigmoid(graph, _apply(graph, self.z, z)))
        flat = graph.op("Reshape", out, graph.ints(0, 0, 8 * self.heads))
        graph.output("y", graph.op("MatMul", flat, graph.weight(8 * self.heads, 16)), ["B", "T", 16])
        graph.output("S1", last, ["B", self.heads, 8, 8])
        return graph

    def model(self) -> onnx.ModelProto:
        return self.graph().model()

    def _operands(self, graph: Graph) -> dict[str, str]:
        width, keys = 8 * self.heads, 8 * (self.heads // 2 if self.repeat else self.heads)
        raw = [_linear(graph, size) for size in (keys, keys, width)]
        if self.joined:
            raw = graph.ops("Split", graph.op("Concat", *raw, axis=-1), graph.ints(keys, keys, width), count=3, axis=-1)
        if self.conv:
            raw = [_conv(graph, x, size) for x, size in zip(raw, (keys, keys, width), strict=True)]
        q, k, v = (_apply(graph, hook, _heads(graph, x)) for hook, x in zip((self.q, self.k, self.v), raw, strict=True))
        q, k = _apply(graph, self.norm_qk, q), _apply(graph, self.norm_qk, k)
        q = graph.op("Mul", q, graph.const(self.scale))
        q, k = _apply(graph, self.repeat, q), _apply(graph, self.repeat, k)
        g = _linear(graph, width)
        g = softplus_decay(graph, g, self.heads) if self.decay is None else _heads(graph, self.decay(graph, g))
        beta = _apply(graph, self.rate, self.beta(graph, _linear(graph, self.heads)))
        return {"q": q, "k": k, "v": v, "g": _apply(graph, self.g, g), "beta": beta}

    def _scan(self, graph: Graph, state: str, values: dict[str, str]) -> tuple[str, str]:
        """(the last state, the outputs [B, T, H, 8])"""
        body = Graph("b", self.dtype)
        starts = [graph.const(np.array(0, np.int64)), state] if self.live else [state]
        if self.live:
            seen = body.input("seen", [], TensorProto.INT64)
            body.output("seen_next", body.op("Add", seen, body.const(np.array(1, np.int64))), [], TensorProto.INT64)
        old, *names = (body.input(name, None) for name in ("S", "qt", "kt", "vt", "gt", "bt"))
        if self.live:
            on = body.op("Cast", body.op("Less", seen, body.const(np.array(self.live, np.int64))), to=body.kind)
            names[-1] = body.op("Mul", names[-1], on)
        new, out = delta_step(body, old, *names)
        body.output("S_next", _apply(body, self.carried, new), None)
        body.output("o", out, None)
        first = [
            graph.op("Transpose", value, perm=[1, 0, 2] if name == "beta" else [1, 0, 2, 3])
            for name, value in values.items()
        ]
        *_, last, outputs = graph.ops(
            "Scan", *starts, *first, count=len(starts) + 1, num_scan_inputs=5, body=body.body()
        )
        return last, graph.op("Transpose", outputs, perm=[1, 0, 2, 3])


def token_layer(
    heads: int = 4,
    *,
    rank: int = 3,
    squeeze_first: bool = True,
    factors: np.ndarray | None = None,
    batch: int | str = 1,
) -> onnx.ModelProto:
    """One token without any loop: x [B, 1, 8] or, of rank 2, [B, 8]; S0 [B, heads, 16, 16] -> y, S1.

    Of rank 3, the time axis is dropped before the L2 norm and the gate, or only in front of the recurrence, where heads
    have an axis of their own that moves. ``factors``: one for each head, multiplied into q.
    """
    graph = Graph()
    dims: list[int | str] = [batch, 8] if rank == 2 else [batch, 1, 8]
    graph.input("x", dims)
    graph.input("S0", [batch, heads, 16, 16])
    early = rank == 3 and squeeze_first
    late = rank == 3 and not squeeze_first

    def split(x: str) -> str:
        if rank == 2:
            return graph.op("Reshape", x, graph.ints(0, heads, 16))
        x = graph.op("Reshape", x, graph.ints(0, 1, heads, 16))
        return graph.op("Squeeze", x, graph.ints(1)) if early else x

    def enter(x: str, perm: tuple[int, ...] = (0, 2, 1, 3)) -> str:
        return graph.op("Squeeze", graph.op("Transpose", x, perm=perm), graph.ints(2)) if late else x

    q, k, v = (split(_linear(graph, 16 * heads, 8)) for _ in range(3))
    q, k = l2norm(graph, q), l2norm(graph, k)
    q = graph.op("Mul", q, graph.const(0.25))
    if factors is not None:
        q = graph.op("Mul", q, graph.const(np.asarray(factors, np.float32).reshape(heads, 1)))
    biased = graph.op("Add", _linear(graph, 16 * heads, 8), graph.const(np.full(16 * heads, 0.1)))
    rates = graph.const(-np.exp(graph.rng.uniform(-1, 1, (heads, 1))))
    g = graph.op("Mul", graph.op("Softplus", split(biased)), rates)
    beta = sigmoid(graph, _linear(graph, heads, 8))
    beta = graph.op("Squeeze", beta, graph.ints(1)) if early else enter(beta, (0, 2, 1))
    new, out = delta_step(graph, "S0", enter(q), enter(k), enter(v), enter(g), beta)
    flat = graph.op("Reshape", out, graph.ints(0, 16 * heads) if rank == 2 else graph.ints(0, 1, 16 * heads))
    graph.output("y", graph.op("MatMul", flat, graph.weight(16 * heads, 8)), dims)
    graph.output("S1", new, [batch, heads, 16, 16])
    return graph.model()


def softplus_decay(graph: Graph, raw: str, heads: int = 2, divide: bool = False) -> str:
    """-A * softplus(raw + bias) for [B, T, heads * 8] -> [B, T, heads, 8]; ``divide`` by -1/A instead."""
    biased = graph.op("Add", raw, graph.const(graph.rng.standard_normal(8 * heads) * 0.3))
    soft = _heads(graph, graph.op("Softplus", biased))
    rates = -np.exp(graph.rng.uniform(-1, 1, (heads, 1)))
    return graph.op("Div", soft, graph.const(1 / rates)) if divide else graph.op("Mul", soft, graph.const(rates))


def _apply(graph: Graph, hook: Hook | None, value: str) -> str:
    return value if hook is None else hook(graph, value)


def _linear(graph: Graph, width: int, hidden: int = 16) -> str:
    return graph.op("MatMul", "x", graph.weight(hidden, width))


def _heads(graph: Graph, x: str) -> str:
    """[B, T, H * 8] -> [B, T, H, 8]; what has heads already stays."""
    return graph.op("Reshape", x, graph.ints(0, 0, -1, 8))


def _conv(graph: Graph, x: str, channels: int) -> str:
    """A causal depthwise convolution of width 4, and SiLU."""
    x = graph.op("Transpose", x, perm=[0, 2, 1])
    x = graph.op("Pad", x, graph.ints(0, 0, 3, 0, 0, 0), graph.const(0.0))
    x = graph.op("Conv", x, graph.weight(channels, 1, 4, size=0.5), group=channels)
    x = graph.op("Transpose", x, perm=[0, 2, 1])
    return graph.op("Mul", x, sigmoid(graph, x))
