"""Wrong latent attention in forms that are brought to others first: left as it is, or fused into exactly that wrong."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from deltafuse.fusions.pipeline import fuse_model
from exports import library

from .mla_mutant_check import assert_not_fused_into_something_else
from .mla_plain_mutants import MUTANTS

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
    assert_not_fused_into_something_else(base, edit, inputs, right, (1.0, 30.0))


@pytest.mark.parametrize("base", BASES)
def test_the_right_layers_are_fused(base: str) -> None:
    assert fuse_model(library.export(base).model()).count("mla") == 1
