"""Wrong latent attention in forms that are brought to others first: left as it is, or fused into exactly that wrong."""

from __future__ import annotations

from functools import cache

import numpy as np
import onnx_ir as ir
import pytest
from deltafuse.fusions.pipeline import fuse_model
from exports import library

from .editor import Editor
from .mla_plain_mutants import MUTANTS

TOLERANCE = 1e-4
BASES = tuple(dict.fromkeys(base for base, _ in MUTANTS.values()))


@cache
def inputs(base: str, scale: float) -> library.Arrays:
    export = library.export(base)
    feeds = export.feeds({**export.bindings[0], "S": 57, "past": 23}, seed=5)
    if base == "mla_scatter":
        feeds["rest_0"] = np.array([17])
    if base == "mla_deepseek":
        feeds["rest_2"] += np.triu(np.full((57, 57), -np.inf, np.float32), 1)
    return {n: a * np.float32(scale) if n == "x" else a for n, a in feeds.items()}


@cache
def right(base: str, scale: float) -> library.Arrays:
    return library.run(library.session(library.export(base).proto()), inputs(base, scale))


@pytest.mark.parametrize("name", MUTANTS)
def test_no_mutant_is_fused_into_something_else(name: str) -> None:
    base, edit = MUTANTS[name]
    editor = Editor(library.export(base).proto())
    edit(editor)
    mutated = editor.done()
    before = library.session(mutated)
    truths = {scale: library.run(before, inputs(base, scale)) for scale in (1.0, 30.0)}
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


@pytest.mark.parametrize("base", BASES)
def test_the_right_layers_are_fused(base: str) -> None:
    assert fuse_model(library.export(base).model()).count("mla") == 1
