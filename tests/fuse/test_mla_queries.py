"""Queries whose rotary part is the first of each head's channels; cosines and sines of one table."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from exports import library
from mutants.editor import Editor

from . import kit

NOPE, ROPE = 8, 4


def rope_first(name: str) -> Editor:
    """The layer gives each head's rotary part before the other."""
    e = Editor(library.export(name).proto())
    cut = next(n for n in e.graph.node if n.op_type == "Split" and e.array(n.input[1]).tolist() == [NOPE, ROPE])
    cut.input[1] = e.const([ROPE, NOPE], np.int64)
    cut.output[:] = list(cut.output)[::-1]
    return e


@pytest.mark.parametrize("name", ["mla_half", "mla_true_rope", "mla_expanded", "mla_bool_op23"])
def test_the_layer_gives_the_rotary_part_first(name: str) -> None:
    export, before = library.export(name), rope_first(name).done()
    report, after = kit.fuse(before)
    assert report.count("mla") == 1, kit.why(report)
    kit.same(before, after, *map(export.feeds, export.bindings))


def test_keys_and_queries_are_joined_the_other_way_round_too() -> None:
    """Without a cache of keys nobody sees in which order theirs are."""
    e = rope_first("mla_half")
    for node in ("node_cat_2", "node_cat_3"):
        inputs = e.node(node).input
        inputs[:] = list(inputs)[::-1]
    before = e.done()
    report, after = kit.fuse(before)
    assert report.count("mla") == 1, kit.why(report)
    kit.same(before, after, *map(library.export("mla_half").feeds, library.export("mla_half").bindings))


def joined_unlike(e: Editor) -> None:
    """Queries lie as their layer gives them, keys the other way round: other products of channels."""
    inputs = e.node("node_cat_3").input
    inputs[:] = list(inputs)[::-1]


def wide_part_turned(e: Editor) -> None:
    """The first channels are rotated, but others than those that are cut off first."""
    e.read("node_cat_3", 0, e.make("Concat", *_halves(e, "split_with_sizes_split_0")[::-1], axis=-1))


def _halves(e: Editor, value: str) -> list[str]:
    bounds = [[e.const([n], np.int64) for n in pair] for pair in ((0, 4, 3), (4, 8, 3))]
    return [e.make("Slice", value, *b) for b in bounds]


@pytest.mark.parametrize("edit", [joined_unlike, wide_part_turned])
def test_other_orders_are_right_or_left(edit: object) -> None:
    assert callable(edit)
    e = rope_first("mla_half")
    edit(e)
    before = e.done()
    report, after = kit.fuse(before)
    onnx.checker.check_model(after)
    kit.same(before, after, *map(library.export("mla_half").feeds, library.export("mla_half").bindings))
    assert report.regions


def test_cosines_and_sines_split_off_one_table() -> None:
    """ONNX Runtime's optimiser makes `table[..., 0]` and `table[..., 1]` a `Split` with a `Squeeze` behind it."""
    e = Editor(library.export("mla_half").proto())
    both = np.stack([e.array(e.node(f"node_GatherND_{n}").input[0]) for n in (33, 41)], axis=-1)
    rows = e.make("GatherND", e.const(both), "val_31")
    e.made += 2
    parts = [f"edited_{e.made - 1}", f"edited_{e.made}"]
    e.graph.node.append(onnx.helper.make_node("Split", [rows, e.const([1, 1], np.int64)], parts, axis=3))
    for part, node in zip(parts, ("node_unsqueeze", "node_unsqueeze_1"), strict=True):
        e.read(node, 0, e.make("Squeeze", part, e.const([3], np.int64)))
    before = e.done()
    report, after = kit.fuse(before)
    assert report.count("mla") == 1, kit.why(report)
    kit.same(before, after, *map(library.export("mla_half").feeds, library.export("mla_half").bindings))
