"""The readable report: narrow, without colours, with nothing that markup could swallow."""

from __future__ import annotations

import io

import pytest
from deltafuse import show
from deltafuse.custom_ops.common.refusal import Refusal
from deltafuse.fusions.result import FusionReport, PassReport, QuantizationReport, QuantizedTensor
from deltafuse.report_html import verdict

from .kit import example_report


def text_of(report: FusionReport, width: int = 80) -> str:
    out = io.StringIO()
    show.print_report(report, file=out, width=width)
    return out.getvalue()


def test_contents() -> None:
    text = text_of(example_report())
    flat = " ".join(text.split())
    assert "model.layers.0.attn" in text and "model.layers.1.attn" not in text
    assert "Repaired norm_1: float32 scale cast to bfloat16" in flat
    assert "1 other that changed nothing" in flat


@pytest.mark.parametrize("width", [60, 80, 120])
def test_width(width: int) -> None:
    assert max(map(len, text_of(example_report(), width).splitlines())) <= width


def test_square_brackets_survive() -> None:
    report = example_report()
    report.regions[0].name = "layers[0].attn"
    report.regions[2].refusal = Refusal("shape", "found [B, 3, T]", "node[/x]")
    report.warnings.append("see [red]")
    text = text_of(report, 120)
    assert "layers[0].attn" in text and "found [B, 3, T] (node 'node[/x]')" in text and "see [red]" in text


def test_nothing_recognised() -> None:
    assert "No region was recognised" in text_of(FusionReport(dry_run=True, nodes_before=5))


def test_fused_already_is_said() -> None:
    text = " ".join(text_of(FusionReport(nodes_before=5, already_fused={"kda": 2, "moe": 1})).split())
    assert "fused already when it came: kda=2, moe=1" in text and "Nothing more in this model looks like" in text
    assert verdict(FusionReport(already_fused={"kda": 2})) == (
        "good",
        "2 blocks had been fused before, no more were recognised; the model is as it was.",
    )


def test_quantization_is_said() -> None:
    tensors = [QuantizedTensor(f"w{i}", "experts", "int4:32", 0.01 * i, 4096, 640) for i in (1, 3, 2)]
    notes = [f"dense: w{i} stays" for i in range(12)]
    done = QuantizationReport({"experts": "int4:32", "dense": "int8"}, "", tensors, notes, 8192, 1024)
    text = " ".join(text_of(FusionReport(nodes_before=5, quantization=done), 120).split())
    assert "experts as int4:32: 3 weights, relative error at most 3.0e-02 (w3)" in text
    assert "all weights: 8.0 KiB before, 1.0 KiB after" in text
    assert "dense: w9 stays" in text and "dense: w10 stays" not in text and "and 2 more" in text
    assert verdict(FusionReport(quantization=done))[1] == "Nothing was recognised; weights were quantized."


def test_notes_of_passes_are_said() -> None:
    passes = [PassReport("latent-cache", notes=["no cache"]), PassReport("quantize", notes=["elsewhere"])]
    text = text_of(FusionReport(nodes_before=5, passes=passes))
    assert "latent-cache: no cache" in text and "elsewhere" not in text


def test_unproved_is_said() -> None:
    report = example_report()
    report.verify = False
    report.regions[0].status, report.regions[0].proof = "fused-unproved", None
    assert "not verified: --no-verify" in text_of(report) and "not proved" in text_of(report)


@pytest.mark.parametrize(("value", "text"), [(0, "0 B"), (1023, "1023 B"), (4096, "4.0 KiB"), (3 << 30, "3.0 GiB")])
def test_size(value: int, text: str) -> None:
    assert show.size(value) == text


@pytest.mark.parametrize(("value", "text"), [(0.0012, "1.2 ms"), (0.034, "34 ms"), (2.345, "2.3 s"), (1234, "1,234 s")])
def test_seconds(value: float, text: str) -> None:
    assert show.seconds(value) == text
