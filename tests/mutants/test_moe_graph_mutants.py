"""A wrong mixture of experts is left as it is, or fused into something that computes exactly the same wrong thing."""

from __future__ import annotations

from functools import cache

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from deltafuse.fusions.pipeline import fuse_model
from exports import library
from onnx import TensorProto

from . import moe_form_mutants, moe_later_mutants  # noqa: F401 (they add to MUTANTS)
from .editor import Editor
from .moe_graph_mutants import MUTANTS

#: Sizes of the inputs. Small ones show what is added, large ones what saturates and what is clamped.
SCALES = (0.03, 1.0, 4.0)
TOKENS = 400
TOLERANCE = 1e-4


def inputs(base: str, scale: float) -> library.Arrays:
    feeds = library.export(base).feeds({"S": TOKENS}, seed=7)
    return {name: array * np.float32(scale) for name, array in feeds.items()}


@cache
def right(base: str, scale: float) -> library.Arrays:
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
    truths = {scale: library.run(before, inputs(base, scale)) for scale in SCALES}
    differences = [library.worst(truth, right(base, scale))[0] for scale, truth in truths.items()]
    assert max(differences) > 10 * TOLERANCE, "the edit changes nothing that the test could see"

    report = fuse_model(ir.from_proto(mutated))
    assert report.model is not None
    after = library.session(report.model)
    for scale, truth in truths.items():
        error, output = library.worst(library.run(after, inputs(base, scale)), truth)
        assert error <= TOLERANCE, (
            f"{[r.status for r in report.regions]}: inputs of size {scale}: {output} is off by {error:.1e}"
        )


def test_what_is_rounded_on_its_way_is_not_taken() -> None:
    """Biases, weights: too little for a proof to see."""
    gpt, biased = moe_later_mutants.GPT, moe_later_mutants.BIASED
    for base, value in ((biased, "val_172"), (gpt, "val_83"), (biased, "val_149"), (gpt, "val_28")):
        editor = Editor(library.export(base).proto())
        editor.after(value, "Cast", to=TensorProto.FLOAT16)
        editor.after("edited_1", "Cast", to=TensorProto.FLOAT)
        assert fuse_model(ir.from_proto(editor.done())).count("moe") == 0


def test_the_right_blocks_are_fused() -> None:
    """The bases themselves fuse: what the mutants show is not a recogniser that refuses everything."""
    for base in {base for base, _ in MUTANTS.values()}:
        assert fuse_model(library.export(base).model()).count("moe") == 1, base
