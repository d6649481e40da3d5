"""Fusing exports for tests, once each, and comparing models."""

from __future__ import annotations

from functools import cache

import numpy as np
import onnx
import onnx_ir as ir
from deltafuse.fusions.pipeline import fuse_model
from deltafuse.fusions.result import FusionReport
from exports import library
from exports.strip import strip

Arrays = library.Arrays
OP = ("deltafuse", "KimiDeltaAttention")


def fused(name: str, stripped: bool = False) -> tuple[onnx.ModelProto, FusionReport, onnx.ModelProto]:
    """(the export, the report, the fused model); treat all three as read-only. Made once in a run of the tests."""
    return _fused(name, stripped)


@cache
def _fused(name: str, stripped: bool) -> tuple[onnx.ModelProto, FusionReport, onnx.ModelProto]:
    before = library.export(name).proto()
    if stripped:
        before = strip(before)
    report = fuse_model(ir.from_proto(before))
    assert report.model is not None
    return before, report, ir.to_proto(report.model)


def fuse(model: onnx.ModelProto) -> tuple[FusionReport, onnx.ModelProto]:
    """Fuse a model in memory."""
    report = fuse_model(ir.from_proto(model))
    assert report.model is not None
    return report, ir.to_proto(report.model)


def why(report: FusionReport) -> str:
    """Status and reason of every region, for assertion messages."""
    return "; ".join(f"{r.name}: {r.status} {r.refusal or ''}" for r in report.regions) or "nothing recognised"


def calls(model: onnx.ModelProto) -> int:
    """How many fused nodes the graph has."""
    return sum(1 for n in model.graph.node if (n.domain, n.op_type) == OP)


def ops(graph: onnx.GraphProto) -> set[str]:
    """Operators in the graph and its subgraphs; bodies of functions are not looked into."""
    found = set()
    for node in graph.node:
        found.add(node.op_type)
        for attribute in node.attribute:
            if attribute.HasField("g"):
                found |= ops(attribute.g)
    return found


def valid(model: onnx.ModelProto) -> bool:
    """Does the checker pass the model? (Some tools write ops that only ORT knows.)"""
    try:
        onnx.checker.check_model(model)
    except onnx.checker.ValidationError:
        return False
    return True


def same(before: onnx.ModelProto, after: onnx.ModelProto, *feeds: Arrays, tolerance: float = 1e-4) -> None:
    """Both models give the same on each of these inputs under stock ORT."""
    first, second = library.session(before), library.session(after)
    for inputs in feeds:
        truth, found = library.run(first, inputs), library.run(second, inputs)
        assert list(found) == list(truth)
        for name, value in truth.items():
            assert np.isfinite(value).all(), f"the test's own input makes {name} not finite"
            assert found[name].dtype == value.dtype
            error = library.error(found[name], value)
            assert error <= tolerance, f"{name}: relative L2 error {error:.1e}"
