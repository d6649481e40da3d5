"""Deep models: one proof for all equal layers, and work that grows with the number of layers and no faster."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import onnx
import onnx_ir as ir
from deltafuse.fusions.pipeline import fuse_model
from deltafuse.fusions.result import FusionReport
from exports import library
from exports.grow import grow

from . import kit


def deep(layers: int) -> onnx.ModelProto:
    """That many KDA layers and one MLA layer, each with its own weights."""
    return grow(library.export("kimi_prefill_static").proto(), [0] * layers + [1])


def work(model: ir.Model) -> tuple[int, FusionReport]:
    """Python calls made while fusing: the same on every machine and at every load, unlike seconds."""
    count = 0

    def tick(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(tick)
    try:
        report = fuse_model(model)
    finally:
        sys.setprofile(None)
    return count, report


def test_one_proof_serves_all_layers() -> None:
    before = deep(6)
    report, after = kit.fuse(before)
    assert report.count("kda") == 6
    assert report.count("mla") == 1
    for op in ("kda", "mla"):
        assert sum(1 for r in report.regions if r.op == op and r.proof is not None and not r.proof.reused) == 1
    kit.same(before, after, library.export("kimi_prefill_static").feeds())


def test_work_grows_linearly() -> None:
    counts = {}
    for layers in (1, 2, 4):
        counts[layers], report = work(ir.from_proto(deep(layers)))
        assert report.count("kda") == layers
    first, second = counts[2] - counts[1], counts[4] - counts[2]
    assert second < 2.4 * first, f"calls by layers: {counts}"
