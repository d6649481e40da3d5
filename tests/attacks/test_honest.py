"""KDA in forms that were once refused, or fused into something else: it fuses, and computes what it did."""

from __future__ import annotations

from functools import partial

import numpy as np
import onnx
import pytest

from . import kit
from .attacks import clip, raw
from .builder import Graph, Hook, Layer, l2norm, rmsnorm, softplus_decay, token_layer


def repeated_by_expand(graph: Graph, x: str) -> str:
    """[B, T, 1, 8] -> [B, T, 2, 8], and so on: each head twice."""
    wide = graph.op("Expand", graph.op("Unsqueeze", x, graph.ints(3)), graph.ints(1, 1, 1, 2, 1))
    return graph.op("Reshape", wide, graph.ints(0, 0, 4, 8))


def repeated_by_gather(graph: Graph, x: str) -> str:
    return graph.op("Gather", x, graph.ints(0, 0, 1, 1), axis=2)


def residual(graph: Graph, o: str) -> str:
    """o + D x: what bypasses the recurrence."""
    bypass = graph.op("Reshape", graph.op("MatMul", "x", graph.weight(16, 16)), graph.ints(0, 0, 2, 8))
    return graph.op("Add", o, bypass)


def per_channel(graph: Graph, o: str) -> str:
    return graph.op("Mul", o, graph.const(np.linspace(0.5, 2.0, 8)))


def layer_norm(graph: Graph, o: str) -> str:
    return graph.op("LayerNormalization", o, graph.weight(8, size=1.0), graph.weight(8, size=0.1), axis=-1)


def centred(graph: Graph, o: str) -> str:
    return rmsnorm(graph, graph.op("Sub", o, graph.op("ReduceMean", o, graph.ints(-1), keepdims=1)))


def norm_over_all_heads(graph: Graph, o: str) -> str:
    mean = graph.op("ReduceMean", graph.op("Mul", o, o), graph.ints(-1, -2), keepdims=1)
    return graph.op("Div", o, graph.op("Sqrt", graph.op("Add", mean, graph.const(1e-5))))


def gate_before_norm(graph: Graph, o: str) -> str:
    gate = graph.op("Reshape", graph.op("MatMul", "x", graph.weight(16, 16)), graph.ints(0, 0, 2, 8))
    return rmsnorm(graph, graph.op("Mul", o, graph.op("Sigmoid", gate)))


def longer_sequences_louder(graph: Graph, o: str) -> str:
    """Beyond 100 tokens, times log(T) / log(100): behind the recurrence, where it may depend on anything."""
    size = graph.op("Cast", graph.op("Shape", "x", start=1, end=2), to=graph.kind)
    return graph.op(
        "Mul", o, graph.op("Max", graph.const(1.0), graph.op("Div", graph.op("Log", size), graph.const(4.6)))
    )


def reversed_heads(graph: Graph, z: str) -> str:
    return graph.op("Gather", z, graph.ints(1, 0), axis=2)


def norm_with_a_floor(graph: Graph, x: str) -> str:
    length = graph.op("ReduceL2", x, graph.ints(-1), keepdims=1)
    return graph.op("Div", x, graph.op("Max", length, graph.const(1e-12)))


TAILS: dict[str, Hook] = {
    "residual": residual,
    "per_channel": per_channel,
    "layer_norm": layer_norm,
    "centred": centred,
    "norm_over_all_heads": norm_over_all_heads,
    "gate_before_norm": gate_before_norm,
    "clipped": clip(-1.0, 1.0),
    "longer_sequences_louder": longer_sequences_louder,
}
LAYERS: dict[str, Layer] = {
    "plain": Layer(),
    "no_conv": Layer(conv=False),
    "bare_rate": Layer(beta=raw),
    "norm_with_a_floor": Layer(norm_qk=norm_with_a_floor),
    "large_eps": Layer(norm_qk=partial(l2norm, eps=0.5), conv=False),
    "decay_divided": Layer(decay=partial(softplus_decay, divide=True), conv=False),
    "joined_and_split": Layer(joined=True, conv=False),
    "repeated_by_expand": Layer(heads=4, repeat=repeated_by_expand),
    "repeated_by_gather": Layer(heads=4, repeat=repeated_by_gather),
    "output_gate_of_other_heads": Layer(z=reversed_heads),
    "output_gate_clipped": Layer(z=clip(-20.0, 20.0)),
    "half": Layer(dtype=np.float16),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_are_fused(name: str) -> None:
    before = LAYERS[name].model()
    report, after = kit.fuse(before)
    assert report.count("kda") == 1, kit.why(report)
    # a rate without a sigmoid, and half precision, leave the numbers' range on large inputs
    sizes = (0.01, 0.3, 1.0) if name in ("bare_rate", "half") else kit.SIZES
    kit.agree(before, after, sizes=sizes)


@pytest.mark.parametrize("name", TAILS)
def test_what_stands_behind_the_recurrence_stays_there(name: str) -> None:
    before = Layer(conv=False, o=TAILS[name], norm_o=None, gated=False).model()
    report, after = kit.fuse(before)
    assert report.count("kda") == 1, kit.why(report)
    kit.agree(before, after, states=10.0)


@pytest.mark.parametrize("tap", ["q", "k", "v", "g", "beta", "o"])
def test_values_of_the_block_stay_outputs(tap: str) -> None:
    before = Layer(tap=tap).model()
    report, after = kit.fuse(before)
    assert report.count("kda") == 1, kit.why(report)
    kit.agree(before, after)


@pytest.mark.parametrize(
    "before",
    [
        pytest.param(token_layer(), id="squeezed-before-the-norm"),
        pytest.param(token_layer(squeeze_first=False), id="squeezed-behind-it"),
        pytest.param(token_layer(squeeze_first=False, batch="B"), id="squeezed-behind-it-batches"),
        pytest.param(token_layer(batch="B"), id="squeezed-batches"),
        pytest.param(token_layer(rank=2), id="no-time-axis"),
        pytest.param(token_layer(rank=2, batch="B"), id="no-time-axis-batches"),
    ],
)
def test_single_tokens_are_fused(before: onnx.ModelProto) -> None:
    report, after = kit.fuse(before)
    assert report.count("kda") == 1, kit.why(report)
    kit.agree(before, after, lengths=(1,))
