"""Forms that are written out for the recogniser: fused in each, and back in their own where nothing is fused."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from deltafuse.fusions.mla.plain import Plain
from deltafuse.fusions.pipeline import fuse_model
from exports import library
from onnx import helper, numpy_helper

from . import kit

LENGTHS = ({"S": 4, "B": 2}, {"S": 11, "B": 3})


def inverse() -> onnx.ModelProto:
    """Rotations as `RotaryEmbedding` nodes over computed cosines, the mask by `masked_fill`."""
    model = library.export("mla_inverse_op23").proto()
    assert sum(n.op_type == "RotaryEmbedding" for n in model.graph.node) == 2
    return model


def by_table(contrib: bool, interleaved: bool) -> onnx.ModelProto:
    """The same with tables and places, as ONNX has it or ONNX Runtime."""
    model = inverse()
    angles = np.outer(np.arange(64), [1.0, 0.1]).astype(np.float32)
    for name, table in (("cos_rows", np.cos(angles)), ("sin_rows", np.sin(angles))):
        model.graph.initializer.append(numpy_helper.from_array(table, name))
    for node in model.graph.node:
        if node.op_type != "RotaryEmbedding":
            continue
        x, tables = node.input[0], ["cos_rows", "sin_rows"]
        node.input[:] = [x, "rest_0", *tables] if contrib else [x, *tables, "rest_0"]
        node.domain = "com.microsoft" if contrib else ""
        del node.attribute[:]
        node.attribute.append(helper.make_attribute("interleaved", int(interleaved)))
    if contrib:
        model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    return model


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("contrib", [False, True])
def test_rotary_embeddings_with_tables(contrib: bool, interleaved: bool) -> None:
    before = by_table(contrib, interleaved)
    report = fuse_model(ir.from_proto(before))
    assert report.count("mla") == 1 and report.model is not None, kit.why(report)
    assert report.regions[0].config["rope"] in (("interleaved", "deinterleaved") if interleaved else ("half",))
    after = ir.to_proto(report.model)
    assert "RotaryEmbedding" not in kit.ops(after.graph)
    kit.same(before, after, *map(library.export("mla_inverse_op23").feeds, LENGTHS))


@pytest.mark.parametrize("contrib", [None, False, True])
def test_what_is_not_fused_keeps_its_form(contrib: bool | None) -> None:
    """A soft cap on the scores: refused, and every node is there as before."""
    before = inverse() if contrib is None else by_table(contrib, False)
    softmax = next(n for n in before.graph.node if n.op_type == "Softmax")
    fill = next(n for n in before.graph.node if n.op_type == "Where" and softmax.input[0] in n.output)
    place = list(before.graph.node).index(fill)
    before.graph.node.insert(place, helper.make_node("Tanh", [fill.input[2]], ["capped"]))
    fill.input[2] = "capped"
    onnx.checker.check_model(before)
    report = fuse_model(ir.from_proto(before))
    assert report.count("mla") == 0 and report.model is not None
    assert [r.refusal.code for r in report.regions if r.refusal is not None] == ["softcap"]
    after = ir.to_proto(report.model)
    onnx.checker.check_model(after)
    kinds = ("RotaryEmbedding", "Not", "Where", "Unsqueeze", "Slice", "Gather")
    counts = [
        {k: c for k, c in Counter(n.op_type for n in m.graph.node).items() if k in kinds} for m in (before, after)
    ]
    assert counts[0] == counts[1]
    kit.same(before, after, *map(library.export("mla_inverse_op23").feeds, LENGTHS))


@pytest.mark.parametrize("form", ["rows", "places", "contrib"])
@pytest.mark.parametrize("partial", [0, 4])
@pytest.mark.parametrize("interleaved", [0, 1])
@pytest.mark.parametrize("rank", [3, 4])
def test_a_rotation_written_out_is_the_same(rank: int, interleaved: int, partial: int, form: str) -> None:
    """Proofs run what is written out, so nothing else would tell."""
    contrib, places, heads, width = form == "contrib", form != "rows", 3, 8
    half = (partial or width) // 2
    x = ["B", "S", heads * width] if rank == 3 else ["B", heads, "S", width]
    table: list[int | str] = [20, half] if places else ["B", "S", half]
    inputs = ["x", "places", "cos", "sin"] if contrib else ["x", "cos", "sin", *(["places"] if places else [])]
    node = helper.make_node(
        "RotaryEmbedding",
        inputs,
        ["turned"],
        name="rotation",
        domain="com.microsoft" if contrib else "",
        interleaved=interleaved,
        num_heads=heads,
        rotary_embedding_dim=partial,
    )
    value = helper.make_tensor_value_info
    kind = onnx.TensorProto.FLOAT
    graph = helper.make_graph(
        [node, helper.make_node("Neg", ["turned"], ["y"]), helper.make_node("Softmax", ["turned"], ["weights"])],
        "rotation",
        [value("x", kind, x), value("cos", kind, table), value("sin", kind, table)]
        + ([value("places", onnx.TensorProto.INT64, ["B", "S"])] if places else []),
        [value("y", kind, x), value("weights", kind, x)],
    )
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid("com.microsoft", 1)]
    before = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    model = ir.from_proto(before)
    plain = Plain(model.graph)
    plain.make()
    after = ir.to_proto(model)
    assert "RotaryEmbedding" not in kit.ops(after.graph)
    plain.restore()
    again = ir.to_proto(model)
    assert [n.op_type for n in again.graph.node] == [n.op_type for n in graph.node]
    rng = np.random.default_rng(0)
    sizes = {"B": 2, "S": 5}
    feeds = {
        v.name: rng.standard_normal([sizes.get(d, d) for d in library.shape_of(v)]).astype(np.float32)
        for v in before.graph.input
    }
    if places:
        feeds["places"] = rng.integers(0, 20, (2, 5))
    kit.same(before, after, feeds)
    kit.same(before, again, feeds)
