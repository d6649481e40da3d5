"""Wrong latent attention in ONNX Runtime's rotations, masks of three axes, branches, complex numbers and turned caches:
left as it is, or fused into exactly that wrong."""

from __future__ import annotations

from functools import cache

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from deltafuse.fusions.pipeline import fuse_model
from exports import library

from .mla_later_mutants import EXPORTS, MUTANTS, right_model
from .mla_mutant_check import assert_not_fused_into_something_else


@cache
def source(base: str) -> onnx.ModelProto:
    return right_model(base)


@cache
def inputs(base: str, scale: float) -> library.Arrays:
    export = library.export(EXPORTS[base])
    feeds = export.feeds({**export.bindings[0], "S": 57, "past": 23}, seed=5)
    return {n: a * np.float32(scale) if n == "x" else a for n, a in feeds.items()}


@cache
def right(base: str, scale: float) -> library.Arrays:
    return library.run(library.session(source(base)), inputs(base, scale))


@pytest.mark.parametrize("name", MUTANTS)
def test_no_mutant_is_fused_into_something_else(name: str) -> None:
    base, edit = MUTANTS[name]
    assert_not_fused_into_something_else(base, edit, inputs, right, (1.0, 30.0), source)


@pytest.mark.parametrize("base", EXPORTS)
def test_the_right_layers_are_fused(base: str) -> None:
    assert fuse_model(ir.from_proto(source(base))).count("mla") == 1
