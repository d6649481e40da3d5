"""What every mutant of latent attention has to show: it is left as it is, or fused into exactly what it computes."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import onnx
import onnx_ir as ir
from deltafuse.fusions.pipeline import fuse_model
from exports import library

from .editor import Editor

TOLERANCE = 1e-4


def exported(base: str) -> onnx.ModelProto:
    """An export by its name."""
    return library.export(base).proto()


def assert_not_fused_into_something_else(
    base: str,
    edit: Callable[[Editor], None],
    inputs: Callable[[str, float], library.Arrays],
    right: Callable[[str, float], library.Arrays],
    scales: Iterable[float],
    source: Callable[[str], onnx.ModelProto] = exported,
) -> None:
    """Edits the model, fuses it, and compares the two where the edit shows.

    Args:
        base: a right model's name; edit: what makes it wrong.
        inputs: of the model, by its name and their size; right: what the unedited model gives for them.
        scales: the sizes.
        source: the models, by name.
    """
    editor = Editor(source(base))
    edit(editor)
    mutated = editor.done()
    before = library.session(mutated)
    truths = {scale: library.run(before, inputs(base, scale)) for scale in scales}
    truths = {s: t for s, t in truths.items() if all(np.isfinite(v).all() for v in t.values())}
    assert truths
    seen = max(library.worst(t, right(base, s))[0] for s, t in truths.items())
    assert seen > 10 * TOLERANCE, "the edit changes nothing that the test could see"
    report = fuse_model(ir.from_proto(mutated))
    assert report.model is not None
    after = library.session(report.model)
    for scale, truth in truths.items():
        error, output = library.worst(library.run(after, inputs(base, scale)), truth)
        assert error <= TOLERANCE, f"{[r.status for r in report.regions]}: size {scale}: {output} is off by {error:.1e}"
