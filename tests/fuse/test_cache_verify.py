"""`verify` of 8-bit caches in front of routers: a token that is given other experts is told from a wrong cache."""

from __future__ import annotations

from pathlib import Path

import deltafuse
import numpy as np
import onnx
import pytest
from deltafuse.compare import _rows_off, compare
from exports import library


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model with experts, and the same with float8 caches."""
    folder = tmp_path_factory.mktemp("experts")
    before, after = folder / "before.onnx", folder / "after.onnx"
    onnx.save(library.export("dsv3_wrap_decode_dyn_batched").proto(), before)
    deltafuse.fuse(before, after, verify=False, latent_cache=True, quantize="cache=fp8:128")
    return before, after


def test_rows_that_differ_are_counted_and_explained(pair: tuple[Path, Path]) -> None:
    found = compare(*pair, tokens=(5,), tolerance=1e-5)
    assert not found.same
    counted = [check for case in found.cases for check in case.outputs if not check.state]
    assert sum(c.rows for c in counted) == 5 + 4  # a prompt and four steps, from empty caches
    assert all((check.rows_off > 0) == (not check.same) for check in counted)
    counts = f"{sum(c.rows_off for c in counted)} of 9 rows"
    assert len(found.notes) == 1 and counts in found.notes[0] and "experts" in found.notes[0]
    assert found.to_dict()["notes"] == found.notes


def test_what_is_the_same_needs_no_explanation(pair: tuple[Path, Path]) -> None:
    before, _ = pair
    assert compare(before, before, tokens=(5,)).notes == []
    assert compare(*pair, tokens=(5,), tolerance=10.0).notes == []


def test_without_8_bits_or_experts_nothing_is_excused(pair: tuple[Path, Path], tmp_path: Path) -> None:
    before, _ = pair
    wrong = onnx.load(before)
    for tensor in wrong.graph.initializer:
        if "norm" in tensor.name:
            array = onnx.numpy_helper.to_array(tensor)
            tensor.CopyFrom(onnx.numpy_helper.from_array((array * 1.5).astype(array.dtype), tensor.name))
    onnx.save(wrong, tmp_path / "wrong.onnx")
    found = compare(before, tmp_path / "wrong.onnx", tokens=(5,))
    assert not found.same and found.notes == []


def test_rows_are_counted_one_by_one() -> None:
    truth = np.random.default_rng(0).standard_normal((2, 4, 8)).astype(np.float32)
    found = truth * np.float32(1.001)
    found[1, 2] = -truth[1, 2]
    found[0, 0, 3] = np.nan
    assert _rows_off(found, truth, 1e-2) == (2, 8)
    assert _rows_off(found[0], truth, 1e-2) == (0, 0)
    assert _rows_off(np.arange(4), np.arange(4) + 1, 1e-2) == (0, 0)
