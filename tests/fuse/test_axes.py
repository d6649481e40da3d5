"""Models whose dynamic axes lost their names: layers are found as before, and the interface stays as it is."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from deltafuse.fusions.pipeline import fuse_model
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


#: Names that nothing can compute with: dots (PyTorch's older exporter makes names of an input's own), hyphens, blanks.
ODD: dict[str, Callable[[str], str]] = {
    "dots": lambda name: f"{name}.0_dynamic_axes_1",
    "hyphens": lambda name: f"{name}-length",
    "blanks": lambda name: f"length of {name}",
    "a question mark": lambda name: "?",
}


def with_names(model: onnx.ModelProto, change: Callable[[str], str]) -> onnx.ModelProto:
    renamed = onnx.ModelProto.FromString(model.SerializeToString())
    del renamed.graph.value_info[:]
    for value in (*renamed.graph.input, *renamed.graph.output):
        for dim in value.type.tensor_type.shape.dim:
            if dim.HasField("dim_param"):
                dim.dim_param = re.sub(r"[A-Za-z_]\w*", lambda found: change(found[0]), dim.dim_param)
    return renamed


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize(
    "name", ["mla_deepseek_v3_decode", "mla_inverse_op23", "kimi_prefill_dyn", "moe_gather_dynbatch"]
)
def test_names_that_are_no_identifiers(name: str, odd: str) -> None:
    export = library.export(name)
    before = with_names(export.proto(), ODD[odd])
    report, after = kit.fuse(before)
    counts = [report.count(op) for op in ("kda", "mla", "moe")]
    assert counts == [export.kda, export.mla, export.moe or 0], kit.why(report)
    assert all("mask" in region.absorbed for region in report.regions if region.op == "mla")
    assert interface(after) == interface(before)
    kit.same(before, after, export.feeds(export.bindings[0]), tolerance=export.tolerance)


def test_new_inputs_have_the_models_own_names() -> None:
    before = with_names(library.export("mla_expanded").proto(), ODD["dots"])
    report = fuse_model(ir.from_proto(before), latent_cache=True)
    assert report.count("mla") == 1 and report.model is not None
    shapes = {v.name: library.shape_of(v) for v in ir.to_proto(report.model).graph.input}
    assert [shape[1] for name, shape in shapes.items() if name.startswith("rest_")] == ["past.0_dynamic_axes_1"] * 2


def with_own_names(model: onnx.ModelProto) -> onnx.ModelProto:
    """Every axis of a cache that has a name gets another, as `dynamic_axes` gives where each input has its own."""
    renamed = onnx.ModelProto.FromString(model.SerializeToString())
    del renamed.graph.value_info[:]
    for value in (*renamed.graph.input, *renamed.graph.output):
        for axis, dim in enumerate(value.type.tensor_type.shape.dim):
            if dim.HasField("dim_param") and "past" in dim.dim_param:
                dim.dim_param = f"{value.name}_{axis}"
    return renamed


@pytest.mark.parametrize("names", [without_names, with_own_names])
@pytest.mark.parametrize("name", ["mla_expanded", "mla_latent_piece", "mla_absorbed", "mla_deepseek_v3_decode"])
def test_two_caches_whose_lengths_have_no_common_name(
    name: str, names: Callable[[onnx.ModelProto], onnx.ModelProto]
) -> None:
    """No run takes caches of two lengths, neither before nor after."""
    export = library.export(name)
    before = names(export.proto())
    report, after = kit.fuse(before)
    assert report.count("mla") == 1, kit.why(report)
    assert "mask" in report.regions[0].absorbed
    assert interface(after) == interface(before)
    kit.same(before, after, *map(export.feeds, export.bindings), tolerance=export.tolerance)
    feeds, caches = export.feeds({**export.bindings[0], "past": 5, "S": 1}), []
    for value in before.graph.input:
        if 5 in feeds[value.name].shape:
            caches.append((value.name, feeds[value.name].shape.index(5)))
    (first, axis), _ = caches
    feeds[first] = np.take(feeds[first], range(3), axis)
    for model in (before, after):
        with pytest.raises(Exception, match=r"Concat|MatMul|Add|ScatterND"):
            library.run(library.session(model), feeds)
