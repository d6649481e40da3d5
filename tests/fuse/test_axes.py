"""Models whose dynamic axes lost their names: layers are found as before, and the interface stays as it is."""

from __future__ import annotations

import onnx
import pytest
from exports import library

from . import kit


def without_names(model: onnx.ModelProto) -> onnx.ModelProto:
    stripped = onnx.ModelProto.FromString(model.SerializeToString())
    graph = stripped.graph
    for value in (*graph.input, *graph.output, *graph.value_info):
        for dim in value.type.tensor_type.shape.dim:
            if dim.HasField("dim_param"):
                dim.ClearField("dim_param")
    return stripped


def interface(model: onnx.ModelProto) -> list[bytes]:
    return [v.name.encode() + v.type.SerializeToString() for v in (*model.graph.input, *model.graph.output)]


@pytest.mark.parametrize(
    "name", ["kimi_prefill_dyn", "kda_scan_dynT", "bailing_dynbatch_prefill", "moe_gather_dynbatch"]
)
def test_axes_without_names(name: str) -> None:
    export = library.export(name)
    before = without_names(export.proto())
    assert any(
        not d.HasField("dim_value") and not d.HasField("dim_param")
        for v in before.graph.input
        for d in v.type.tensor_type.shape.dim
    ), "the export has no dynamic axis"
    report, after = kit.fuse(before)
    assert (report.count("kda"), report.count("moe")) == (export.kda, export.moe), kit.why(report)
    assert interface(after) == interface(before)
    kit.same(before, after, *map(export.feeds, export.bindings), tolerance=export.tolerance)


def test_a_name_that_is_taken_is_not_given() -> None:
    """An axis called as the stand-in would be is another axis."""
    export = library.export("kimi_prefill_dyn")
    before = without_names(export.proto())
    first = before.graph.input[0]
    extra = before.graph.input.add()
    extra.CopyFrom(onnx.helper.make_tensor_value_info("unused", onnx.TensorProto.FLOAT, [f"{first.name}_1", 3]))
    report, after = kit.fuse(before)
    assert report.count("kda") == export.kda, kit.why(report)
    assert interface(after) == interface(before)
