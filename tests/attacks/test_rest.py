"""Branches, random nodes, float64, and constants that differ between the heads a proof looks at."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from deltafuse.fusions.proof import problem
from exports import library
from onnx import TensorProto, helper

from . import kit
from .attacks import unary
from .builder import Graph, Layer, token_layer


def _branching(layer: Layer, through: str) -> onnx.ModelProto:
    """The layer with an output z: by a flag, the value named ``through`` or its negative. Identity is the only way."""
    graph = layer.graph()
    graph.input("flag", [], TensorProto.BOOL)
    value = "y" if through == "output" else graph.op("Mul", "y", graph.const(2.0))
    branches = [
        helper.make_graph(
            [helper.make_node(kind, [value], [name])],
            name,
            [],
            [helper.make_tensor_value_info(name, graph.kind, ["B", "T", 16])],
        )
        for kind, name in (("Identity", "kept"), ("Neg", "negated"))
    ]
    graph.output("z", graph.op("If", "flag", then_branch=branches[0], else_branch=branches[1]), ["B", "T", 16])
    return graph.model()


@pytest.mark.parametrize("through", ["output", "inner"])
@pytest.mark.parametrize("kda", [True, False])
def test_a_branch_may_hand_on_an_outer_value(kda: bool, through: str) -> None:
    before = _branching(Layer() if kda else Layer(rate=unary("Sin")), through)
    report, after = kit.fuse(before)
    assert report.count("kda") == int(kda), kit.why(report)
    rng = np.random.default_rng(0)
    feeds = {"x": rng.standard_normal((3, 9, 16)), "S0": rng.standard_normal((3, 2, 8, 8))}
    first, second = library.session(before), library.session(after)
    for flag in (True, False):
        inputs = {**feeds, "flag": np.array(flag)}
        error, name = library.worst(library.run(second, inputs), library.run(first, inputs))
        assert error < 1e-5, name


def test_float64_is_refused_by_name() -> None:
    """The op would compute it in float32."""

    def decay(graph: Graph, raw: str) -> str:
        soft = graph.op("Log", graph.op("Add", graph.op("Exp", raw), graph.const(1.0)))
        rates = graph.const(-np.exp(graph.rng.uniform(-1, 1, 16)))
        return graph.op("Mul", soft, rates)

    before = Layer(conv=False, dtype=np.float64, decay=decay).model()
    report, after = kit.fuse(before)
    assert [r.status for r in report.regions] == ["refused"]
    assert report.regions[0].refusal is not None
    assert "float64" in report.regions[0].refusal.reason
    rng = np.random.default_rng(0)
    feeds = {"x": rng.standard_normal((3, 50, 16)), "S0": rng.standard_normal((3, 2, 8, 8))}
    for found, truth in zip(*(library.session(m).run(None, feeds) for m in (after, before)), strict=True):
        assert found.dtype == np.float64
        assert library.error(found, truth) < 1e-14


def test_dropout_of_a_constant_stays_random() -> None:
    graph = Graph()
    graph.input("x", ["N", 64])
    training = graph.const(np.array(True))
    kept = graph.op("Dropout", graph.const(np.ones(64)), graph.const(0.5), training)
    graph.output("y", graph.op("Add", "x", kept), ["N", 64])
    _, after = kit.fuse(graph.model())
    assert "Dropout" in {node.op_type for node in after.graph.node}
    session = library.session(after)
    feeds = {"x": np.zeros((1, 64), np.float32)}
    first, second = (library.run(session, feeds)["y"] for _ in range(2))
    assert not np.array_equal(first, second)


@pytest.mark.parametrize("squeeze_first", [True, False])
def test_heads_between_those_of_a_cut_proof_count(monkeypatch: pytest.MonkeyPatch, squeeze_first: bool) -> None:
    """The proof runs the first and the last of six heads; a constant of the four between them is another."""
    monkeypatch.setattr(problem, "CUT_ABOVE", 1 << 10)
    plain = token_layer(6, squeeze_first=squeeze_first)
    report, after = kit.fuse(plain)
    assert report.count("kda") == 1, kit.why(report)
    proof = report.regions[0].proof
    assert proof is not None
    assert proof.heads == [0, 5], "the proof was not cut down: the test below shows nothing"
    kit.agree(plain, after, lengths=(1,))

    uneven = token_layer(6, squeeze_first=squeeze_first, factors=np.array([1, 3, 3, 3, 3, 1]))
    report, after = kit.fuse(uneven)
    assert report.count("kda") == 0
    assert report.regions[0].refusal is not None
    assert report.regions[0].refusal.code in ("mismatch", "scale", "reading"), kit.why(report)
    kit.agree(uneven, after, lengths=(1,))
