"""Exports that went through other tools first: every layer is still found, and outputs stay."""

from __future__ import annotations

import onnx
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


def test_the_tools_do_what_they_are_here_for() -> None:
    """Fused ops of ORT inside, metadata gone, the opset raised: else the tests above would show nothing."""
    model = library.export("hybrid4_decode").proto()
    assert {n.domain for n in TOOLS["ort_extended"](model).graph.node} >= {"com.microsoft"}
    assert {n.domain for n in TOOLS["optimize_for_ort"](model).graph.node} >= {"com.microsoft"}
    converted = TOOLS["onnx_converted"](model)
    assert converted.opset_import[0].version == 23
    assert not any(n.metadata_props for n in converted.graph.node)
