"""What takes a join apart reads its parts; what takes something else of it stays."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from deltafuse.fusions.cleanup.splits import RemoveIdleSplits
from deltafuse.fusions.result import PassReport
from onnx import helper, numpy_helper

from . import kit


def model(take: tuple[str, dict[str, object], list[object]], widths: tuple[int, ...] = (2, 3, 1)) -> onnx.ModelProto:
    """Parts of these widths joined along axis 1, and one node that takes something of it."""
    kind, attributes, constants = take
    value = helper.make_tensor_value_info
    parts = [value(f"part_{i}", 1, ["B", w, 4]) for i, w in enumerate(widths)]
    names = [f"constant_{i}" for i in range(len(constants))]
    made = [numpy_helper.from_array(np.asarray(c, np.int64), n) for c, n in zip(constants, names, strict=True)]
    outputs = [f"out_{i}" for i in range(len(widths) if kind == "Split" else 1)]
    nodes = [
        helper.make_node("Concat", [p.name for p in parts], ["joined"], axis=1),
        helper.make_node(kind, ["joined", *names], outputs, name="take", **attributes),
        *(helper.make_node("Neg", [name], [f"{name}_negated"]) for name in outputs),
    ]
    results = [value(f"{name}_negated", 1, None) for name in outputs]
    graph = helper.make_graph(nodes, "joined", parts, results, made)
    made_model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    return onnx.shape_inference.infer_shapes(made_model, data_prop=True)


def cleaned(before: onnx.ModelProto) -> tuple[onnx.ModelProto, int]:
    given = ir.from_proto(before)
    report = PassReport("")
    RemoveIdleSplits().run(given, report)
    return ir.to_proto(given), report.matched


def same(before: onnx.ModelProto, after: onnx.ModelProto) -> None:
    rng = np.random.default_rng(0)
    shapes = {v.name: [2, *(d.dim_value for d in v.type.tensor_type.shape.dim[1:])] for v in before.graph.input}
    kit.same(before, after, {n: rng.standard_normal(s).astype(np.float32) for n, s in shapes.items()})


RIGHT = {
    "split": ("Split", {"axis": 1}, [[2, 3, 1]]),
    "first": ("Slice", {}, [[0], [2], [1]]),
    "middle": ("Slice", {}, [[2], [5], [1], [1]]),
    "last, from the end": ("Slice", {}, [[-1], [2**62], [-2]]),
}
WRONG = {
    "other sizes": ("Split", {"axis": 1}, [[3, 2, 1]]),
    "two parts": ("Slice", {}, [[0], [5], [1]]),
    "half a part": ("Slice", {}, [[2], [4], [1]]),
    "every second": ("Slice", {}, [[2], [5], [1], [2]]),
    "backwards": ("Slice", {}, [[4], [1], [1], [-1]]),
    "along another axis": ("Slice", {}, [[0], [2], [2]]),
    "two axes": ("Slice", {}, [[0, 0], [2, 2], [1, 2]]),
    "one of wider parts": ("Gather", {"axis": 1}, [0]),
}


@pytest.mark.parametrize("take", RIGHT)
def test_the_parts_themselves_are_read(take: str) -> None:
    before = model(RIGHT[take])
    after, matched = cleaned(before)
    assert matched == 1 and not kit.ops(after.graph) & {"Split", "Slice"}
    same(before, after)


@pytest.mark.parametrize("index", [0, 2, -1])
def test_one_of_parts_of_size_one(index: int) -> None:
    before = model(("Gather", {"axis": 1}, [index]), (1, 1, 1))
    after, matched = cleaned(before)
    assert matched == 1 and "Gather" not in kit.ops(after.graph)
    same(before, after)


@pytest.mark.parametrize("take", WRONG)
def test_what_takes_something_else_stays(take: str) -> None:
    before = model(WRONG[take])
    after, matched = cleaned(before)
    assert not matched
    same(before, after)


@pytest.mark.parametrize("take", [("Gather", {"axis": 1}, [[1]]), ("Gather", {"axis": 2}, [1])])
def test_other_choices_of_parts_of_size_one_stay(take: tuple[str, dict[str, object], list[object]]) -> None:
    before = model(take, (1, 1, 1))
    after, matched = cleaned(before)
    assert not matched
    same(before, after)
