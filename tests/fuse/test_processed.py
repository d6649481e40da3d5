"""Exports that went through other tools first: every layer is still found, and outputs stay."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import pytest
from exports import library
from exports.processed import TOOLS

from . import kit

ORT = ("ort_basic", "ort_extended", "ort_all")
CONVERTERS = ("onnxscript_converted", "onnx_converted")
PLAN = (
    [("hybrid4_decode", tool) for tool in TOOLS]
    + [("kimi_prefill_static", tool) for tool in (*ORT, *CONVERTERS)]
    + [("bailing_prefill_static_op23", tool) for tool in ("ort_extended", "onnxscript_converted")]
    + [("bailing_prefill_dynauto_batched", "ort_all")]
    + [("chunk16_T32_beta2", "ort_extended"), ("kda_stack_T8", "ort_all"), ("kda_stack_T8", "optimize_for_ort")]
    + [
        (name, tool)
        for name in ("kda_scan_dynT", "kda_while_dynT")
        for tool in ("ort_all", "optimize_for_ort", "onnx_converted")
    ]
    + [("decode_conv3_native_op23", tool) for tool in ORT]
    + [("bailing_decode_f16_op20", tool) for tool in ("ort_all", "optimize_for_ort", "onnx_converted")]
)


@pytest.mark.parametrize(("name", "tool"), PLAN)
def test_layers_are_found_after(name: str, tool: str) -> None:
    export = library.export(name)
    original = export.proto()
    before = TOOLS[tool](original)
    report, after = kit.fuse(before)
    assert report.count("kda") == export.kda, kit.why(report)
    if kit.valid(before):
        onnx.checker.check_model(after)
    feeds = [export.feeds(binding) for binding in export.bindings[:2]]
    kit.same(before, after, *feeds, tolerance=export.tolerance)
    kit.same(original, after, *feeds, tolerance=export.tolerance)


@pytest.mark.parametrize(
    ("name", "tool"),
    [
        ("mla_deepseek_v3_decode_f16", "ort_all"),
        ("mla_hub_f16", "ort_extended"),
        ("mla_latent_f16", "ort_basic"),
        ("mla_static", "ort_all"),
        ("mla_causal_op23", "ort_all"),
        ("kimi_prefill_f16", "ort_all"),
        ("mla_rows", "ort_all"),
        ("mla_deepseek_v2_hf", "optimize_for_ort"),
    ],
)
def test_latent_attention_is_found_after(name: str, tool: str) -> None:
    """ORT's CPU computes 16 bits in float32 between casts, and writes a softmax of them out."""
    export = library.export(name)
    original = export.proto()
    before = TOOLS[tool](original)
    report, after = kit.fuse(before)
    assert report.count("mla") == export.mla, kit.why(report)
    assert "Softmax" not in kit.ops(after.graph) or export.moe
    feeds = [export.feeds(binding) for binding in export.bindings[:2]]
    kit.same(before, after, *feeds, tolerance=export.tolerance)
    kit.same(original, after, *feeds, tolerance=export.tolerance)


@pytest.mark.parametrize(
    ("change", "found"), [({}, 1), ({"sum": "0"}, 0), ({"max": "0"}, 0), ({"of": "y"}, 0), ({"under": "y"}, 0)]
)
def test_a_softmax_written_out_is_one(change: dict[str, str], found: int) -> None:
    """Over one axis and of one value; else it is something else and stays."""
    part = {"sum": "1", "max": "-1", "of": "x", "under": "e", **change}
    model = onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["" : 18]>
        agraph (float[4, N] x, float[4, N] y) => (float[4, N] o) {{
            sum_axes = Constant <value = int64[1] {{{part["sum"]}}}> ()
            max_axes = Constant <value = int64[1] {{{part["max"]}}}> ()
            m = ReduceMax({part["of"]}, max_axes)
            d = Sub(x, m)
            e = Exp(d)
            s = ReduceSum({part["under"]}, sum_axes)
            o = Div(e, s)
        }}"""
    )
    report, after = kit.fuse(model)
    assert ("Softmax" in kit.ops(after.graph)) == bool(found)
    assert ("Exp" in kit.ops(after.graph)) != bool(found)
    assert next(p for p in report.passes if p.name == "join-softmax").matched == found
    rng = np.random.default_rng(0)
    feeds = {n: rng.uniform(0.5, 2.0, (4, 5)).astype(np.float32) for n in ("x", "y")}
    if found:
        feeds["x"] *= 100.0
    kit.same(model, after, feeds, tolerance=1e-6)


def test_the_tools_do_what_they_are_here_for() -> None:
    """Fused ops of ORT inside, metadata gone, the opset raised: else the tests above would show nothing."""
    model = library.export("hybrid4_decode").proto()
    assert {n.domain for n in TOOLS["ort_extended"](model).graph.node} >= {"com.microsoft"}
    assert {n.domain for n in TOOLS["optimize_for_ort"](model).graph.node} >= {"com.microsoft"}
    converted = TOOLS["onnx_converted"](model)
    assert converted.opset_import[0].version == 23
    assert not any(n.metadata_props for n in converted.graph.node)
