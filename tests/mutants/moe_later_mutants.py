"""Mistakes in exports of what mixtures of experts have besides: biases, gpt-oss's activation, zero experts, choices one
by one, rows that are added up."""

from __future__ import annotations

import numpy as np

from .editor import Editor
from .moe_graph_mutants import constant, mutant, reads, skips

GPT, ZERO, BIASED = "moe_gpt_oss", "moe_zero_gather", "moe_biased_gather"
BY_CHOICE, ADDED = "moe_by_choice", "moe_added_rows"

# --- gpt-oss --------------------------------------------------------------------------------------------------------

skips("gate and up without their biases", "node_add_46", base=GPT)
skips("down without its biases", "node_add_102", base=GPT)
skips("no offset", "node_add_71", base=GPT)
skips("no slope", "node_mul_47", base=GPT)
constant("another slope", "node_mul_47", 1, 1.5, base=GPT)
constant("another offset", "node_add_71", 1, 0.9, base=GPT)
constant("up clamped further out below", "node_clamp_1", 1, -2.0, base=GPT)
reads("a sigmoid of the unclamped gate", "node_mul_47", 0, "slice_3", base=GPT)
reads("weights are logits", "node_view_1", 0, "getitem", base=GPT)


@mutant("the offset before the clamp", GPT)
def _(e: Editor) -> None:
    e.skip("node_add_71")
    e.read("node_clamp_1", 0, e.make("Add", "slice_4", e.const(1.0)))


@mutant("biases of the next expert", GPT)
def _(e: Editor) -> None:
    other = e.make("Mod", e.make("Add", "val_26", e.const(1, np.int64)), e.const(8, np.int64))
    e.read("node_GatherND_83", 1, other)


@mutant("a bias after the weights", GPT)
def _(e: Editor) -> None:
    e.skip("node_add_102")
    e.read("node_Reshape_126", 0, e.make("Add", "mul_77", "val_83"))


@mutant("chosen logits cooled down", GPT)
def _(e: Editor) -> None:
    e.read("node_Softmax_6", 0, e.make("Mul", "getitem", e.const(1.25)))


# --- biases ---------------------------------------------------------------------------------------------------------

reads("gate and up with each other's biases", "node_add_105", 1, "val_125", base=BIASED)
skips("up without its bias", "node_add_123", base=BIASED)


@mutant("a bias that is multiplied", BIASED)
def _(e: Editor) -> None:
    e.op("node_add_149", "Mul")


# --- zero experts ---------------------------------------------------------------------------------------------------

reads("tokens that no zero expert got", "node_mul_102", 1, "sum_2", base=ZERO)
reads("weights of zero experts count among the others", "node_unsqueeze_3", 0, "mul_66", base=ZERO)
constant("three zero experts for the tokens", "node_where_1", 1, 0.1, base=ZERO)
reads("a zero expert gives the router's scores", "node_mul_102", 0, "sum_3", base=ZERO)
mutant("zero experts are subtracted", ZERO)(lambda e: e.op("node_add_156", "Sub"))


@mutant("the others get the tokens back", ZERO)
def _(e: Editor) -> None:
    node = e.node("node_where_1")
    node.input[1], node.input[2] = node.input[2], node.input[1]


@mutant("one more zero expert for the weights", ZERO)
def _(e: Editor) -> None:
    e.read("node_convert_element_type_default", 0, e.make("Less", "getitem_5", e.const(5, np.int64)))


@mutant("zero experts give back twice the token", ZERO)
def _(e: Editor) -> None:
    e.read("node_mul_102", 0, e.make("Mul", "view", e.const(2.0)))


# --- choices one by one, and rows added up --------------------------------------------------------------------------

reads("a choice with another's weight", "node_mul_132", 0, "slice_3", base=BY_CHOICE)
reads("a choice twice", "node_add_248", 1, "mul_132", base=BY_CHOICE)
reads("gate of one choice, up of another", "node_mul_123", 1, "bmm_1", base=BY_CHOICE)
reads("down projection of another choice", "node_bmm_5", 0, "index_select_2", base=BY_CHOICE)
reads("a choice left out", "node_add_248", 1, "zeros_like_1", base=BY_CHOICE)
mutant("rows replace each other", ADDED)(lambda e: e.attributes("node_ScatterND_97", reduction="max"))


@mutant("tokens in turn, not choice by choice", ADDED)
def _(e: Editor) -> None:
    e.read("node_repeat_interleave", 0, e.make("Transpose", "val_46", perm=[1, 0]))


@mutant("rows go to the tokens before", ADDED)
def _(e: Editor) -> None:
    back = e.make("Max", e.make("Sub", "val_55", e.const(1, np.int64)), e.const(0, np.int64))
    e.read("node_ScatterND_97", 1, back)


@mutant("rows of the tokens before", ADDED)
def _(e: Editor) -> None:
    back = e.make("Max", e.make("Sub", "val_55", e.const(1, np.int64)), e.const(0, np.int64))
    e.read("node_GatherND_57", 1, back)


# --- tokens that chose an expert at all, results that are picked, three factors --------------------------------------

ANY, MASK, PICKED, THREE = "moe_any_choice", "moe_any_mask", "moe_picked", "moe_gather_three"

constant("tokens of another expert", "node_eq_45", 1, 1, np.int64, base=ANY)
constant("a column of another expert", "node_select", 1, 1, np.int64, base=ANY)
mutant("tokens whose choices are all one expert", ANY)(lambda e: e.op("node_ReduceMax_46", "ReduceMin"))
mutant("an expert's result is multiplied in", ANY)(lambda e: e.attributes("node_ScatterND_77", reduction="mul"))
mutant("the larger result stays", ANY)(lambda e: e.attributes("node_ScatterND_112", reduction="max"))
skips("an expert's rows written nowhere", "node_index_put", base=MASK)
mutant("another axis is picked along", PICKED)(lambda e: e.attributes("node_gather_1", axis=2))


def backwards(e: Editor, value: str) -> str:
    """Rows from the last to the first."""
    return e.make("Slice", value, *(e.const(v, np.int64) for v in ([-1], [-9999], [0], [-1])))


mutant("an expert's weights backwards", ANY)(lambda e: e.read("node_GatherND_65", 1, backwards(e, "val_54")))
mutant("an expert's tokens in reverse", ANY)(lambda e: e.read("node_GatherND_56", 1, backwards(e, "val_54")))


@mutant("the next expert's results are picked", PICKED)
def _(e: Editor) -> None:
    e.read("node_gather_1", 1, e.make("Mod", e.make("Add", "expand_2", e.const(1, np.int64)), e.const(8, np.int64)))


@mutant("results of the choices in another order", PICKED)
def _(e: Editor) -> None:
    ints = [e.const(v, np.int64) for v in ([-1], [-100], [1], [-1])]
    e.read("node_gather_1", 1, e.make("Slice", "expand_2", *ints))


@mutant("an expert's result twice in the stack", PICKED)
def _(e: Editor) -> None:
    stack = e.node("node_stack")
    stack.input[3] = stack.input[2]


@mutant("down projections of other experts in one product", THREE)
def _(e: Editor) -> None:
    other = e.make("Mod", e.make("Add", "val_60", e.const(1, np.int64)), e.const(8, np.int64))
    e.read("node_GatherND_109", 1, other)


reads("scores for weights in one product", "node_einsum_2", 2, "gather", base=THREE)
mutant("the sum of squares", THREE)(lambda e: e.op("node_linalg_vector_norm", "ReduceSumSquare"))
mutant("the largest norm", THREE)(lambda e: e.op("node_linalg_vector_norm", "ReduceL2"))
