"""A wrong layer is either left as it is, or fused into something that computes exactly the same wrong thing."""

from __future__ import annotations

from functools import cache

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from deltafuse.fusions.pipeline import fuse_model
from exports import library

from .editor import Editor
from .graph_prompt_mutants import MUTANTS

#: (size of the inputs, size of the states). Tiny inputs show where an eps stands, large ones what saturates.
SCALES = ((1e-3, 1.0), (1e-3, 1e-3), (1.0, 1.0), (10.0, 1.0), (100.0, 1.0), (1.0, 300.0))
TOLERANCE = 1e-4


def inputs(base: str, scale: tuple[float, float]) -> library.Arrays:
    """Random inputs, convolution states with them, and recurrent states of these sizes."""
    export = library.export(base)
    binding = {"s27": 9} if base == "kda_scan_dynT" else export.bindings[0]
    feeds = export.feeds(binding, seed=7)
    sizes = dict.fromkeys(("x", "cq", "ck", "cv", "past.0.conv"), scale[0])
    sizes |= dict.fromkeys(("s0", "past_state", "past.0.state"), scale[1])
    return {name: array * np.float32(sizes[name]) if name in sizes else array for name, array in feeds.items()}


@cache
def right(base: str, scale: tuple[float, float]) -> library.Arrays:
    """What the unedited export gives."""
    return library.run(_session(base), inputs(base, scale))


@cache
def _session(base: str) -> ort.InferenceSession:
    return library.session(library.export(base).proto())


@pytest.mark.parametrize("name", MUTANTS)
def test_no_mutant_is_fused_into_something_else(name: str) -> None:
    base, edit = MUTANTS[name]
    editor = Editor(library.export(base).proto())
    edit(editor)
    mutated = editor.done()

    before = library.session(mutated)
    differences = []
    truths = {}
    for scale in SCALES:
        feeds = inputs(base, scale)
        truth = library.run(before, feeds)
        if all(np.isfinite(value).all() for value in truth.values()):  # some mistakes overflow on large inputs
            truths[scale] = truth
            differences.append(library.worst(truth, right(base, scale))[0])
    assert len(truths) > 1
    assert max(differences) > 10 * TOLERANCE, "the edit changes nothing that the test could see"

    report = fuse_model(ir.from_proto(mutated))
    assert report.model is not None
    after = library.session(report.model)
    for scale, truth in truths.items():
        error, output = library.worst(library.run(after, inputs(base, scale)), truth)
        assert error <= TOLERANCE, (
            f"{[r.status for r in report.regions]}: inputs and states of size {scale}: {output} is off by {error:.1e}"
        )


def test_the_right_layers_are_fused() -> None:
    """The bases themselves fuse: what the mutants show is not a recogniser that refuses everything."""
    for base in {base for base, _ in MUTANTS.values()}:
        assert fuse_model(library.export(base).model()).count("kda") == 1, base
