"""Scores written otherwise, or with something beside those of the keys."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from exports import library
from mutants.editor import Editor

from . import kit

BASE = "mla_half"


def edited() -> Editor:
    return Editor(library.export(BASE).proto())


def less_most(e: Editor, value: str, axis: int = -1) -> str:
    """The scores less the largest of each row, as a softmax is often written."""
    most = e.make("ReduceMax", value, e.const([axis], np.int64), keepdims=1)
    return e.make("Sub", value, most)


def with_sinks(e: Editor) -> onnx.ModelProto:
    """A score for nothing, of each head, beside those of the keys."""
    bounds = (e.const([n], np.int64) for n in (0, -1, -1))
    e.after("softmax", "Slice", *bounds)
    sizes = e.make("Concat", e.const([1, 3], np.int64), "val_1", e.const([1], np.int64), axis=0)
    sinks = e.make("Expand", e.const(np.array([0.5, -1.0, 2.0]).reshape(1, 3, 1, 1)), sizes)
    joined = e.make("Concat", "add_171", sinks, axis=-1)
    e.read("node_softmax", 0, less_most(e, joined))
    return e.done()


def test_scores_less_their_largest() -> None:
    e = edited()
    e.read("node_softmax", 0, less_most(e, "add_171"))
    before = e.done()
    report, after = kit.fuse(before)
    assert report.count("mla") == 1 and "mask" in report.regions[0].absorbed, kit.why(report)
    assert "ReduceMax" not in kit.ops(after.graph)
    kit.same(before, after, *map(library.export(BASE).feeds, library.export(BASE).bindings))


@pytest.mark.parametrize("other", ["along the queries", "of other scores"])
def test_scores_less_something_else_stay(other: str) -> None:
    e = edited()
    if other == "along the queries":
        e.read("node_softmax", 0, less_most(e, "add_171", axis=-2))
    else:
        most = e.make("ReduceMax", e.make("Mul", "matmul", "matmul"), e.const([-2], np.int64), keepdims=1)
        e.read("node_softmax", 0, e.make("Sub", "add_171", most))
    before = e.done()
    report, after = kit.fuse(before)
    assert report.count("mla") == 0
    kit.same(before, after, library.export(BASE).feeds())


def test_sinks_are_said() -> None:
    before = with_sinks(edited())
    report, after = kit.fuse(before)
    assert [(r.status, r.refusal.code) for r in report.regions if r.refusal is not None] == [("refused", "sinks")]
    kit.same(before, after, library.export(BASE).feeds())


def test_sinks_of_other_attention_are_nobodys_business() -> None:
    """Without a norm and a cache, keys and values of one layer are no latents."""
    e = edited()
    e.read("node_linear_2", 0, "split_with_sizes_1_split_0")
    e.read("node_cat_2", 1, e.make("Slice", "expand", *(e.const([n], np.int64) for n in (0, 4, 3))))
    other = e.make("Mul", "transpose_1", e.const(1.0))
    bounds = (e.const([n], np.int64) for n in (8, 12, 3))
    e.read("node_cat_2", 1, e.make("Slice", other, *bounds))
    report, _ = kit.fuse(with_sinks(e))
    assert not report.regions, kit.why(report)


def test_one_key_head_for_three_query_heads() -> None:
    """As many key heads as query heads are a must: it is said, and nothing changes."""
    e = edited()
    e.read("node_linear_2", 1, e.const(e.array(e.node("node_linear_2").input[1])[:, :14]))
    e.read("node_Reshape_157", 1, e.const([1, -1, 1, 14], np.int64))
    for part in ("split_with_sizes_2_split_0", "split_with_sizes_2_split_1"):
        e.after(part, "Tile", e.const([1, 3, 1, 1], np.int64))
    before = e.done()
    report, after = kit.fuse(before)
    reasons = [r.refusal for r in report.regions if r.refusal is not None]
    assert report.count("mla") == 0 and [r.code for r in reasons] == ["heads"], kit.why(report)
    assert "as many key heads as query heads" in reasons[0].reason
    kit.same(before, after, library.export(BASE).feeds())
