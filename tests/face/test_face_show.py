"""The readable report: narrow, without colours, with nothing that markup could swallow."""

from __future__ import annotations

import io

import pytest
from deltafuse import show
from deltafuse.custom_ops.common.refusal import Refusal
from deltafuse.fusions.result import FusionReport

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
