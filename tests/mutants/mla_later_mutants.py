"""More wrong latent attention: ONNX Runtime's rotations, masks of three axes, branches, complex numbers.

The right models are exports that are written in these forms first.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
from exports import library
from onnx import helper, numpy_helper

from .editor import Editor

Edit = Callable[[Editor], None]

CONTRIB = "contrib"  # com.microsoft RotaryEmbedding, tables of 64 places
THREE = "three"  # causal, [1, tokens, keys] added to scores of four axes
BRANCH = "branch"  # the minus of the keys' rotation, and the mask, each in an If whose condition is a constant
PAIRS = "pairs"  # deepseek_v2: rotations by products of complex numbers, [.., pairs, 2]
CACHED = "cached"  # caches of keys and values [batch, tokens, heads, channels]

#: The exports that they are made of.
EXPORTS = {
    CACHED: "mla_deepseek_cached",
    CONTRIB: "mla_inverse_op23",
    THREE: "mla_half",
    BRANCH: "mla_half",
    PAIRS: "mla_deepseek_v2_hf",
}
#: (base, edit) by name.
MUTANTS: dict[str, tuple[str, Edit]] = {}


def mutant(base: str) -> Callable[[Edit], Edit]:
    def register(edit: Edit) -> Edit:
        MUTANTS[edit.__name__] = base, edit
        return edit

    return register


# ---- the right models


def right_model(base: str) -> onnx.ModelProto:
    """The export in the form that the base is named for."""
    model = library.export(EXPORTS[base]).proto()
    if base == CONTRIB:
        _by_tables(model)
    if base not in (THREE, BRANCH):
        return model
    editor = Editor(model)
    editor.made = 1000  # whoever edits it again counts from 1
    if base == THREE:
        editor.read("node_add_171", 1, editor.make("Squeeze", "where", editor.const([0], np.int64)))
    else:
        _branch(editor, "node_cat_1", "neg_1", "slice_3")
        _branch(editor, "node_add_171", "where", "")
    return editor.done()


def _by_tables(model: onnx.ModelProto) -> None:
    angles = np.outer(np.arange(64), [1.0, 0.1]).astype(np.float32)
    for name, table in (("cos_rows", np.cos(angles)), ("sin_rows", np.sin(angles))):
        model.graph.initializer.append(numpy_helper.from_array(table, name))
    for node in model.graph.node:
        if node.op_type == "RotaryEmbedding":
            node.input[:] = [node.input[0], "rest_0", "cos_rows", "sin_rows"]
            node.domain = "com.microsoft"
            del node.attribute[:]
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))


def _branch(e: Editor, reader: str, value: str, other: str) -> None:
    """The reader is given the value if a constant says so, else the other one, or zeros."""

    def graph(inner: onnx.NodeProto) -> onnx.GraphProto:
        result = helper.make_tensor_value_info(inner.output[0], onnx.TensorProto.FLOAT, None)
        return helper.make_graph([inner], inner.output[0], [], [result])

    first = helper.make_node("Identity", [value], [f"{value}_then"])
    second = helper.make_node("Identity", [other], [f"{value}_else"])
    if not other:
        second = helper.make_node("Mul", [value, e.const(0.0)], [f"{value}_else"])
    made = e.make("If", e.const(True, np.bool_), then_branch=graph(first), else_branch=graph(second))
    inputs = e.node(reader).input
    inputs[list(inputs).index(value)] = made


def _branches(e: Editor) -> list[onnx.NodeProto]:
    return [n for n in e.graph.node if n.op_type == "If"]


def _rotations(e: Editor) -> list[str]:
    return [n.name for n in e.graph.node if n.op_type == "RotaryEmbedding"]


# ---- rotations by com.microsoft RotaryEmbedding


@mutant(CONTRIB)
def keys_by_pairs(e: Editor) -> None:
    e.attributes(_rotations(e)[1], interleaved=1)


@mutant(CONTRIB)
def queries_by_pairs(e: Editor) -> None:
    e.attributes(_rotations(e)[0], interleaved=1)


@mutant(CONTRIB)
def keys_a_place_on(e: Editor) -> None:
    e.read(_rotations(e)[1], 1, e.make("Add", "rest_0", e.const(1, np.int64)))


@mutant(CONTRIB)
def keys_from_a_place_on(e: Editor) -> None:
    """Places of one entry are where the first token stands, not where all do."""
    e.read(_rotations(e)[1], 1, e.const([3], np.int64))


@mutant(CONTRIB)
def keys_with_other_angles(e: Editor) -> None:
    angles = np.outer(np.arange(64), [1.0, 0.2]).astype(np.float32)
    e.read(_rotations(e)[1], 2, e.const(np.cos(angles)))
    e.read(_rotations(e)[1], 3, e.const(np.sin(angles)))


@mutant(CONTRIB)
def keys_turned_back(e: Editor) -> None:
    e.read(_rotations(e)[1], 3, e.const(-e.array("sin_rows")))


@mutant(CONTRIB)
def tables_exchanged_for_queries(e: Editor) -> None:
    e.read(_rotations(e)[0], 2, "sin_rows")
    e.read(_rotations(e)[0], 3, "cos_rows")


@mutant(CONTRIB)
def half_of_the_keys_channels(e: Editor) -> None:
    e.attributes(_rotations(e)[1], rotary_embedding_dim=2, num_heads=1)
    for i, table in ((2, "cos_rows"), (3, "sin_rows")):
        e.read(_rotations(e)[1], i, e.const(e.array(table)[:, :1].copy()))


@mutant(CONTRIB)
def keys_of_the_first_sequence_for_all(e: Editor) -> None:
    rows = [e.const([n], np.int64) for n in (0, 1, 0)]
    first = e.make("Slice", _keys(e), *rows)
    e.read(_rotations(e)[1], 0, e.make("Add", e.make("Mul", _keys(e), e.const(0.0)), first))


def _keys(e: Editor) -> str:
    return str(e.node(_rotations(e)[1]).input[0])


# ---- masks of three axes


def _gap(e: Editor) -> str:
    return e.make("Cast", e.make("Sub", "unsqueeze_3", "unsqueeze_2"), to=1)


@mutant(THREE)
def far_keys_less_for_some_heads(e: Editor) -> None:
    slopes = e.make("Mul", _gap(e), e.const(np.array([0.1, 0.2, 0.4]).reshape(3, 1, 1)))
    e.read("node_add_171", 1, e.make("Add", e.node("node_add_171").input[1], slopes))


@mutant(THREE)
def mask_of_one_head_only(e: Editor) -> None:
    one = e.const(np.array([False, True, False]).reshape(3, 1, 1), np.bool_)
    e.read("node_add_171", 1, e.make("Where", one, e.node("node_add_171").input[1], e.const(0.0)))


@mutant(THREE)
def mask_of_three_axes_turned(e: Editor) -> None:
    e.read("node_add_171", 1, e.make("Transpose", e.node("node_add_171").input[1], perm=[0, 2, 1]))


@mutant(THREE)
def mask_of_three_axes_off_by_one(e: Editor) -> None:
    e.read("node_le_1", 1, e.make("Add", "unsqueeze_2", e.const(1, np.int64)))


@mutant(THREE)
def mask_of_the_last_query_for_all(e: Editor) -> None:
    bounds = (e.const([n], np.int64) for n in (-1, 2**31 - 1, 1))
    e.read("node_add_171", 1, e.make("Slice", e.node("node_add_171").input[1], *bounds))


@mutant(THREE)
def mask_of_three_axes_added_twice_and_weak(e: Editor) -> None:
    e.read("node_where", 2, e.const(-2.0))
    e.after("add_171", "Add", e.node("node_add_171").input[1])


# ---- branches


@mutant(BRANCH)
def the_other_branch_for_the_minus(e: Editor) -> None:
    _branches(e)[0].input[0] = e.const(False, np.bool_)


@mutant(BRANCH)
def the_other_branch_for_the_mask(e: Editor) -> None:
    _branches(e)[1].input[0] = e.const(False, np.bool_)


@mutant(BRANCH)
def a_condition_made_of_constants(e: Editor) -> None:
    _branches(e)[0].input[0] = e.make("Not", e.make("Less", e.const(1.0), e.const(2.0)))


@mutant(BRANCH)
def the_minus_for_short_prompts_only(e: Editor) -> None:
    last = e.make("ReduceMax", "positions", keepdims=0)
    _branches(e)[0].input[0] = e.make("Less", last, e.const(50, np.int64))


@mutant(BRANCH)
def the_mask_for_short_prompts_only(e: Editor) -> None:
    count = e.make("Size", "positions")
    _branches(e)[1].input[0] = e.make("Less", count, e.const(50, np.int64))


@mutant(BRANCH)
def the_mask_for_small_inputs_only(e: Editor) -> None:
    _branches(e)[1].input[0] = e.make("Less", e.make("ReduceMax", "x", keepdims=0), e.const(2.0))


# ---- complex numbers


@mutant(PAIRS)
def complex_keys_turned_back(e: Editor) -> None:
    other = e.make("Neg", "val_120")
    e.read("node_Mul_138", 1, other)
    e.read("node_Mul_139", 1, other)


@mutant(PAIRS)
def real_part_for_the_imaginary_of_keys(e: Editor) -> None:
    for node in ("node_Mul_138", "node_Mul_139"):
        e.read(node, 1, "val_119")


@mutant(PAIRS)
def parts_exchanged_for_keys(e: Editor) -> None:
    for node, value in (("137", "val_120"), ("138", "val_119"), ("139", "val_119"), ("140", "val_120")):
        e.read(f"node_Mul_{node}", 1, value)


@mutant(PAIRS)
def product_without_the_minus(e: Editor) -> None:
    e.op("node_Sub_125", "Add")


@mutant(PAIRS)
def queries_pairs_by_halves(e: Editor) -> None:
    turned = e.make("Transpose", "view_3", perm=[0, 1, 2, 4, 3])
    e.read("node_Slice_117", 0, turned)
    e.read("node_Slice_118", 0, turned)


@mutant(PAIRS)
def both_parts_cut_from_the_first(e: Editor) -> None:
    e.read("node_select_1", 1, "val_2")


@mutant(PAIRS)
def parts_joined_the_other_way_round(e: Editor) -> None:
    e.node("node_mul_225").input[:] = ["val_142", "val_141"]


# ---- caches with tokens before heads


def _joined(e: Editor, past: str) -> onnx.NodeProto:
    return next(n for n in e.graph.node if n.op_type == "Concat" and past in n.input)


@mutant(CACHED)
def turned_cache_new_tokens_first(e: Editor) -> None:
    for past in ("rest_2", "rest_3"):
        inputs = _joined(e, past).input
        inputs[:] = list(inputs)[::-1]


@mutant(CACHED)
def turned_cache_of_other_heads(e: Editor) -> None:
    node = _joined(e, "rest_3")
    e.read(node.name, 1, e.make("Gather", node.input[1], e.const([1, 2, 0], np.int64), axis=2))


@mutant(CACHED)
def turned_cache_read_in_other_heads(e: Editor) -> None:
    e.read(_joined(e, "rest_2").name, 0, e.make("Gather", "rest_2", e.const([1, 2, 0], np.int64), axis=2))


@mutant(CACHED)
def turned_cache_of_keys_before_rotation(e: Editor) -> None:
    node = _joined(e, "rest_2")
    bounds = [[e.const([n], np.int64) for n in pair] for pair in ((0, 8, 3), (8, 12, 3))]
    plain, turned = (e.make("Slice", node.input[1], *b) for b in bounds)
    e.read(node.name, 1, e.make("Concat", plain, e.make("Neg", turned), axis=3))
