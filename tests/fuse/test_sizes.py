"""Sizes that a graph computes though its shapes tell them, and sizes that a proof need not know."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from attacks.builder import Graph
from attacks.kit import fuse, why
from attacks.mla_builder import Mla
from deltafuse.fusions.cleanup import cleanup_passes
from deltafuse.fusions.cleanup.infer import infer_open
from deltafuse.fusions.passes import PassManager
from exports import library
from onnx import TensorProto


def cleaned(text: str) -> ir.Model:
    model = ir.from_proto(onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 20]> {text}'))
    PassManager(cleanup_passes())(model)
    return model


def shape(model: ir.Model, name: str) -> list[int | str]:
    values = {v.name: v for node in model.graph for v in node.outputs}
    return [d if isinstance(d, int) else str(d.value) for d in values[name].shape or ()]


def test_an_open_size_is_told_by_the_others() -> None:
    """And what is computed from it is a constant then."""
    model = cleaned(
        """g (float[B, T, 36] x) => (float[B, N, T, 6] y) <int64[1] open = {-1}, int64[1] twelve = {12},
            int64 two = {2}, int64 three = {3}, int64[1] zero = {0}, int64[1] last = {3}> {
            b = Shape <start = 0, end = 1> (x)
            t = Shape <start = 1, end = 2> (x)
            sizes = Concat <axis = 0> (b, t, open, twelve)
            apart = Reshape (x, sizes)
            turned = Transpose <perm = [0, 2, 1, 3]> (apart)
            whole = Shape (turned)
            width = Gather (whole, three)
            half = Div (width, two)
            end = Reshape (half, open)
            y = Slice (turned, zero, end, last)
        }"""
    )
    assert shape(model, "apart") == ["B", "T", 3, 12]
    assert not {"Div", "Gather"} & {node.op_type for node in model.graph}
    assert [str(d) for d in model.graph.outputs[0].shape or ()] == ["B", "N", "T", "6"]  # the model's promise stays


@pytest.mark.parametrize("target", ["{-1, 12}", "{0, -1, 12}", "{2, -1, 12}"])
def test_an_open_size_that_depends_stays_open(target: str) -> None:
    rank = target.count(",") + 1
    model = cleaned(
        f"""g (float[B, T, 36] x) => (float[{", ".join("NMK"[:rank])}] y) <int64[{rank}] target = {target}> {{
            apart = Reshape (x, target)
            y = Neg (apart)
        }}"""
    )
    assert not isinstance(shape(model, "apart")[rank - 2], int)


def test_the_target_of_an_expand() -> None:
    """PyTorch's older exporter puts ones for -1, which only a constant can be."""
    text = """g (float[B, T, 4] x, int64[1] n) => (float[B, H, T, 4] y) <int64[1] open = {{-1}}, int64[1] three = {{3}},
            int64[4] minus = {{-1, -1, -1, -1}}, int64[4] ones = {{1, 1, 1, 1}}, int64[1] one = {{1}}> {{
            wide = Unsqueeze (x, one)
            b = Shape <start = 0, end = 1> (x)
            sizes = Concat <axis = 0> (b, three, {0}, open)
            bad = Equal (sizes, minus)
            target = Where (bad, ones, sizes)
            y = Expand (wide, target)
        }}"""
    for given, stays in (("open", False), ("n", True)):
        model = cleaned(text.format(given))
        assert ("Where" in {node.op_type for node in model.graph}) == stays
        x = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
        found = library.run(library.session(ir.to_proto(model)), {"x": x, "n": np.array([3])})["y"]
        np.testing.assert_array_equal(found, np.broadcast_to(x[:, None], (2, 3, 3, 4)))


def other_rows(graph: Graph, x: str) -> str:
    """As many sequences as another input has rows."""
    rows = graph.op("Shape", "pad", start=0, end=1)
    return graph.op("Reshape", x, graph.op("Concat", rows, graph.op("Shape", x, start=1), axis=0))


def other_tokens(graph: Graph, x: str) -> str:
    """As many tokens as another input has columns; its rows count for nothing."""
    tokens = graph.op("Shape", "pad", start=1, end=2)
    sizes = [graph.op("Shape", x, start=0, end=1), tokens, graph.op("Shape", x, start=2)]
    return graph.op("Reshape", x, graph.op("Concat", *sizes, axis=0))


def test_sizes_of_other_inputs() -> None:
    """One that the region does not read may be any; one that it reads must be an operand's."""
    pad = {"pad": (["M", "T"], TensorProto.BOOL)}
    report, _ = fuse(Mla(normed=other_tokens, inputs=dict(pad)).model())
    assert report.count("mla") == 1, why(report)
    report, _ = fuse(Mla(normed=other_rows, inputs=dict(pad)).model())
    assert report.count("mla") == 0
    assert "M, a size of 'pad', is none of the operands'" in why(report)


@pytest.mark.parametrize("turned", ["", "transA=1", "transB=1"])
def test_products_with_operands_turned_over_have_sizes(turned: str) -> None:
    """ONNX Runtime's optimiser makes such products of scores; what is behind them hangs on their shape."""
    a = "B, 4, 8, S" if turned == "transA=1" else "B, 4, S, 8"
    b = "1, 4, T, 8" if turned == "transB=1" else "1, 4, 8, T"
    text = f"""<ir_version: 10, opset_import: ["": 20, "com.microsoft": 1]>
    agraph (float[{a}] a, float[{b}] b) => (float[B, H, S, T] y)
    {{ scores = com.microsoft.FusedMatMul<{turned or "transA=0"}>(a, b)
       raised = Exp(scores)
       y = Neg(raised) }}"""
    model = ir.from_proto(onnx.parser.parse_model(text))
    infer_open(model)
    for node in list(model.graph)[:2]:
        assert [str(d) for d in node.outputs[0].shape or ()] == ["B", "4", "S", "T"], node.op_type


@pytest.mark.parametrize(
    ("first", "last", "step", "size"),
    [
        ("past", "total", "one", "T"),
        ("past", "other", "one", "T"),
        ("zero", "tokens", "one", "T"),
        ("zero", "inside", "one", "P"),
        ("zero", "total", "one", ""),
        ("past", "tokens", "one", ""),
        ("past", "total", "two", ""),
        ("one", "tokens", "one", ""),
        ("zero", "sum", "one", ""),
    ],
)
def test_positions_are_as_many_as_there_are_tokens(first: str, last: str, step: str, size: str) -> None:
    """From a length on up to that and the tokens more, as PyTorch's older exporter writes `arange(past, past + T)`."""
    model = cleaned(
        f"""g (float[B, T, 4] x, float[B, P, 4] cache) => (int64[M] y)
            <int64 zero = {{0}}, int64 one = {{1}}, int64 two = {{2}}, int64[1] axis = {{0}}> {{
            a = Shape (x)
            b = Shape (cache)
            c = Shape <start = 1, end = 2> (cache)
            tokens = Gather (a, one)
            past = Gather (b, one)
            sum = ReduceMax <keepdims = 0> (a)
            inside = Squeeze (c, axis)
            wide = Cast <to = 7> (past)
            total = Add (past, tokens)
            other = Add (tokens, wide)
            places = Range ({first}, {last}, {step})
            y = Neg (places)
        }}"""
    )
    (found,) = shape(model, "places")
    assert found == size if size else str(found).startswith("unk__")
