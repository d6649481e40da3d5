"""Caches of one size that new tokens are written into by a choice, or by places along all axes.

Each is made of an export that is fused as it is. What looks like it and is something else stays as it is.
"""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from exports import library
from mutants.editor import Edit, Editor, edited

from . import kit

LATENTS = "mla_scatter"  # one token, caches of latents and of rotary keys
KEYS = "mla_start_batch"  # any number of tokens and sequences, caches of keys and values
SIZE = 40


def chosen(
    *,
    turned: bool = False,
    at: str = "Equal",
    further: tuple[int, int] = (0, 0),
    slope: int = 1,
    new: str = "",
) -> Edit:
    """`Where(arange(size) == place, new, past)` for the latents' cache and for the rotary keys'."""

    def edit(e: Editor) -> None:
        writes = [n.name for n in e.graph.node if n.op_type == "ScatterElements"]
        for name, more in zip(writes, further, strict=True):
            past, _, fresh = e.node(name).input
            place = e.make("Add", "rest_0", e.const(more, np.int64)) if more else "rest_0"
            hot = e.make(at, e.const(np.arange(SIZE) * slope, np.int64), place)
            hot = e.make("Not", hot) if turned else hot
            hot = e.make("Reshape", hot, e.const([1, SIZE, 1], np.int64))
            fresh = e.make(new, fresh, past) if new else fresh
            sides = (past, fresh) if turned else (fresh, past)
            found = e.node(name)
            found.op_type = "Where"
            found.input[:] = [hot, *sides]
            del found.attribute[:]

    return edit


def whole(*, zeros: bool = False, backwards: bool = False, value_places: int = 0) -> Edit:
    """`ScatterND` with a place for each axis up to the tokens', as the older exporter writes `cache[:, :, places]`."""

    def edit(e: Editor) -> None:
        name = next(n.output[0] for n in e.graph.node if n.op_type == "Add" and "rest_0" in n.input)
        batch = e.make("Shape", "x", start=0, end=1)
        heads = e.const([3], np.int64)
        tokens = e.make("Shape", "x", start=1, end=2)
        one = e.const([1], np.int64)
        number = [e.const(n, np.int64) for n in (0, 1, 3)]
        rows = e.make("Range", number[0], e.make("Squeeze", batch), number[1])
        if zeros:
            rows = e.make("Mul", rows, number[0])
        head = e.make("Range", number[0], number[2], number[1])
        if backwards:
            head = e.make("Sub", e.const(2, np.int64), head)
        shape = e.make("Concat", batch, heads, tokens, one, axis=0)
        for which, write in enumerate([n.name for n in e.graph.node if n.op_type == "ScatterND"]):
            there = next(n for n in e.graph.node if n.output[0] == e.node(write).input[0])
            fresh = next(n for n in e.graph.node if n.output[0] == e.node(write).input[2])
            back = next(n for n in e.graph.node if e.node(write).output[0] in n.input)
            place = e.make("Add", name, e.const(which * value_places, np.int64))
            lines = [
                e.make("Expand", e.make("Reshape", value, e.const(line, np.int64)), shape)
                for value, line in ((rows, [-1, 1, 1, 1]), (head, [1, 3, 1, 1]), (place, [1, 1, -1, 1]))
            ]
            index = e.make("Concat", *lines, axis=3)
            written = e.make("ScatterND", there.input[0], index, fresh.input[0])
            for node in e.graph.node:
                node.input[:] = [written if v == back.output[0] else v for v in node.input]
            for output in e.graph.output:
                if output.name == back.output[0]:
                    back.output[0] += "_old"
                    e.graph.node[-1].output[0] = output.name
                    for node in e.graph.node:
                        node.input[:] = [output.name if v == written else v for v in node.input]

    return edit


def steps(base: str, model: onnx.ModelProto, place: int) -> library.Arrays:
    given = library.feeds_for(model, {**library.export(base).bindings[0]}, library.export(base).shapes)
    return {**given, "rest_0": np.full_like(given["rest_0"], place)}


@pytest.mark.parametrize("turned", [False, True])
def test_a_token_that_a_choice_writes(turned: bool) -> None:
    model = edited(LATENTS, chosen(turned=turned))
    report, after = kit.fuse(model)
    assert report.count("mla") == 1, kit.why(report)
    assert report.regions[0].config["static_cache"]
    assert not {"Softmax", "ScatterElements"} & kit.ops(after.graph)
    kit.same(model, after, *(steps(LATENTS, model, n) for n in (0, 7, SIZE - 1)))


WRONG_CHOICES = {
    "all places up to it": chosen(at="LessOrEqual"),
    "all others": chosen(turned=True, at="Greater"),
    "one place on": chosen(further=(1, 1)),
    "rotary keys one place on": chosen(further=(0, 1)),
    "every second place": chosen(slope=2),
    "added": chosen(new="Add"),
}


@pytest.mark.parametrize("wrong", WRONG_CHOICES)
def test_other_choices_stay_what_they_are(wrong: str) -> None:
    model = edited(LATENTS, WRONG_CHOICES[wrong])
    report, after = kit.fuse(model)
    assert report.count("mla") == 0
    kit.same(model, after, *(steps(LATENTS, model, n) for n in (4, 9)))


def test_places_along_all_axes() -> None:
    model = edited(KEYS, whole())
    report, after = kit.fuse(model)
    assert report.count("mla") == 1, kit.why(report)
    assert report.regions[0].config["static_cache"]
    assert "ScatterND" not in kit.ops(after.graph)
    kit.same(model, after, *(steps(KEYS, model, n) for n in (0, 30)))


WRONG_PLACES = {
    "all in the first sequence": whole(zeros=True),
    "heads backwards": whole(backwards=True),
    "values one place on": whole(value_places=1),
}


@pytest.mark.parametrize("wrong", WRONG_PLACES)
def test_other_places_stay_what_they_are(wrong: str) -> None:
    model = edited(KEYS, WRONG_PLACES[wrong])
    report, after = kit.fuse(model)
    assert report.count("mla") == 0
    kit.same(model, after, steps(KEYS, model, 5))


# --- writes that reach a part of the cache only -----------------------------------------------------------------------

STEP = "mla_start_window_decode"  # one token of any number of sequences, caches of keys and values


def first_sequence(how: str) -> Edit:
    """The new keys and values of the first sequence are written: into its cache, or by broadcasting into all."""

    def edit(e: Editor) -> None:
        for write in [n.name for n in e.graph.node if n.op_type == "ScatterND"]:
            there = next(n for n in e.graph.node if n.output[0] == e.node(write).input[0])
            fresh = next(n for n in e.graph.node if n.output[0] == e.node(write).input[2])
            back = next(n for n in e.graph.node if e.node(write).output[0] in n.input)
            zero, one = e.const([0], np.int64), e.const([1], np.int64)
            new = fresh.input[0] if how == "right" else e.make("Slice", fresh.input[0], zero, one, zero)
            if how == "elements":
                shape = e.make("Shape", new)
                index = e.make("Expand", e.make("Reshape", "rest_0", e.const([1, 1, 1, 1], np.int64)), shape)
                made = e.make("ScatterElements", there.input[0], index, new, axis=2)
            elif how == "whole":
                head = e.const(np.arange(3).reshape(1, 3, 1, 1), np.int64)
                place = e.make("Reshape", "rest_0", e.const([1, 1, 1, 1], np.int64))
                lines = [e.make("Expand", v, e.const([1, 3, 1, 1], np.int64)) for v in (head, place)]
                nothing = e.const(np.zeros((1, 3, 1, 1)), np.int64)
                made = e.make("ScatterND", there.input[0], e.make("Concat", nothing, *lines, axis=3), new)
            else:
                hot = e.make("Equal", e.const(np.arange(128), np.int64), "rest_0")
                hot = e.make("Reshape", hot, e.const([1, 1, 128, 1], np.int64))
                made = e.make("Where", hot, new, there.input[0])
            back.op_type, back.input[:] = "Identity", [made]
            del back.attribute[:]

    return edit


@pytest.mark.parametrize("how", ["right", "choice", "elements", "whole"])
def test_new_tokens_of_the_first_sequence_only(how: str) -> None:
    model = edited(STEP, first_sequence(how))
    report, after = kit.fuse(model)
    assert report.count("mla") == int(how == "right"), kit.why(report)
    kit.same(model, after, *(steps(STEP, model, n) for n in (0, 30)))


def tokens_first(e: Editor) -> None:
    """A cache of latents [tokens, batch, channels]."""
    join = next(n for n in e.graph.node if n.op_type == "Concat" and "rest_0" in n.input)
    parts = [e.make("Transpose", value, perm=[1, 0, 2]) if value != "rest_0" else value for value in join.input]
    old = join.output[0]
    join.output[0] = "edited_cache"
    join.input[:] = parts
    for attribute in join.attribute:
        attribute.i = 0
    sized = e.make("Transpose", "rest_0", perm=[1, 0, 2])
    for node in e.graph.node:
        if node.op_type == "Shape" and node.input[0] == "rest_0":
            node.input[0] = sized
    turned = e.make("Transpose", "edited_cache", perm=[1, 0, 2])
    for node in e.graph.node:
        node.input[:] = [turned if name == old else name for name in node.input]
    for value, name in ((e.graph.input, "rest_0"), (e.graph.output, old)):
        port = next(v for v in value if v.name == name)
        dims = port.type.tensor_type.shape.dim
        sizes = [onnx.TensorShapeProto.Dimension.FromString(dims[i].SerializeToString()) for i in (1, 0, 2)]
        del dims[:]
        dims.extend(sizes)
        if value is e.graph.output:
            port.name = "edited_cache"


def test_latents_with_tokens_first_are_said() -> None:
    model = edited("mla_latent_piece", tokens_first)
    report, after = kit.fuse(model)
    reasons = [r.refusal.reason for r in report.regions if r.refusal is not None]
    assert len(reasons) == 1 and reasons[0].endswith("in another layout"), kit.why(report)
    kit.same(model, after, library.feeds_for(model, {"S": 4, "past": 3}))


def test_parts_that_were_joined_before_are_said() -> None:
    """Queries and keys are joined of two parts, and cut into two products."""

    def edit(e: Editor) -> None:
        scores = next(n for n in e.graph.node if n.output[0] == "matmul")
        cuts = [[e.const([n], np.int64) for n in pair] for pair in ((0, 8), (8, 12))]
        last, rows = e.const([3], np.int64), e.const([2], np.int64)
        parts = [
            e.make("MatMul", e.make("Slice", scores.input[0], *cut, last), e.make("Slice", scores.input[1], *cut, rows))
            for cut in cuts
        ]
        scores.op_type, scores.input[:] = "Add", parts

    model = edited("mla_half", edit)
    report, after = kit.fuse(model)
    assert report.count("mla") == 0 and "that were joined before" in kit.why(report)
    kit.same(model, after, library.feeds_for(model, {"S": 9}))
