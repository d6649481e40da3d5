"""Fusing a model, and comparing it with itself where no proof looks."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx
import onnx_ir as ir
from deltafuse.fusions.pipeline import fuse_model
from deltafuse.fusions.result import FusionReport
from exports import library

TOLERANCE = 1e-3
LENGTHS = (1, 200, 300)
SIZES = (0.01, 1.0, 100.0)


def fuse(model: onnx.ModelProto) -> tuple[FusionReport, onnx.ModelProto]:
    report = fuse_model(ir.from_proto(model))
    assert report.model is not None
    return report, ir.to_proto(report.model)


def why(report: FusionReport) -> str:
    return (
        "; ".join(f"{r.status} {r.refusal and r.refusal.code} {r.refusal or ''}" for r in report.regions) or "nothing"
    )


def agree(
    before: onnx.ModelProto,
    after: onnx.ModelProto,
    lengths: tuple[int, ...] = LENGTHS,
    sizes: tuple[float, ...] = SIZES,
    states: float = 1.0,
) -> None:
    """Both models give the same wherever the first gives finite numbers, which must be so for half of the inputs."""
    first, second = library.session(before), library.session(after)
    compared = tried = 0
    for feeds, case in _feeds(before, lengths, sizes, states):
        tried += 1
        truth, found = library.run(first, feeds), library.run(second, feeds)
        assert list(found) == list(truth)
        if not all(np.isfinite(value).all() for value in truth.values()):
            continue
        compared += 1
        error, output = library.worst(found, truth)
        assert error <= TOLERANCE, f"{case}: {output} is off by {error:.1e}"
    assert 2 * compared >= tried


def _feeds(
    model: onnx.ModelProto, lengths: tuple[int, ...], sizes: tuple[float, ...], states: float
) -> Iterator[tuple[library.Arrays, str]]:
    rng = np.random.default_rng(5)
    for tokens in lengths:
        for size in sizes:
            feeds: library.Arrays = {}
            for value in model.graph.input:
                shape = [{"B": 3, "T": tokens}.get(d, d) for d in library.shape_of(value)]  # type: ignore[arg-type]
                kind = library.NUMPY_TYPES[value.type.tensor_type.elem_type]
                drawn = rng.standard_normal([int(d) for d in shape]) * (states if value.name == "S0" else size)
                feeds[value.name] = drawn.astype(kind)
            yield feeds, f"{tokens} tokens, inputs of size {size:g}"
