"""Mistakes in exported mixtures of experts: in the router, in the weights, in the experts, in the loops around them.

Each edits a right export in one place. Some are what another model does on purpose (no groups, another mask); those may
be fused, into the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from onnx import TensorProto

from .editor import Editor

Edit = Callable[[Editor], None]
#: name -> (the export, the edit)
MUTANTS: dict[str, tuple[str, Edit]] = {}
GATHER, CLAMP, FEW = "moe_gather", "moe_clamp_before", "moe_few_kept"
LOOP, DENSE, PAIRS = "moe_where_rows", "moe_dense_eq", "moe_dense_pairs"


def mutant(name: str, base: str = GATHER) -> Callable[[Edit], Edit]:
    def add(edit: Edit) -> Edit:
        MUTANTS[name] = (base, edit)
        return edit

    return add


def reads(name: str, node: str, index: int, value: str, base: str = GATHER) -> None:
    """The node reads another value."""
    mutant(name, base)(lambda e: e.read(node, index, value))


def skips(name: str, node: str, index: int = 0, base: str = GATHER) -> None:
    """The node is left out."""
    mutant(name, base)(lambda e: e.skip(node, index))


def constant(name: str, node: str, index: int, number: Any, dtype: Any = np.float32, base: str = GATHER) -> None:
    """The node reads another constant."""
    mutant(name, base)(lambda e: e.read(node, index, e.const(number, dtype)))


# --- the router -----------------------------------------------------------------------------------------------------

reads("bias in the weights", "node_gather", 0, "add_9")
reads("masked choices as weights", "node_gather", 0, "masked_fill")
reads("groups off", "node_topk_2__1", 0, "add_9")
reads("chosen without the bias", "node_masked_fill", 2, "sigmoid")
reads("groups scored without the bias", "node_Reshape_125", 0, "sigmoid")
constant("one group more stays", "node_topk_1__1", 1, [3], np.int64)
constant("one group less stays", "node_topk_1__1", 1, [1], np.int64)
constant("the best one of a group", "node_topk__1", 1, [1], np.int64)
constant("one choice less", "node_topk_2__1", 1, [2], np.int64)


def masked_with(name: str, number: float) -> None:
    """Another fill, where biases far below zero (the same for all) make the kept experts' choices negative."""

    @mutant(name, FEW)
    def edit(e: Editor) -> None:
        e.read("node_add_9", 1, e.const(e.array("gate.e_score_correction_bias") - np.float32(1.9)))
        e.read("node_masked_fill", 1, e.const(number))


masked_with("masked with minus one", -1.0)
masked_with("masked with zero", 0.0)
masked_with("masked with a large number", 1e9)
skips("mask the wrong way round", "node_bitwise_not")
mutant("the worst groups stay")(lambda e: e.attributes("node_topk_1__1", largest=0))
mutant("the worst experts")(lambda e: e.attributes("node_topk_2__1", largest=0))
mutant("groups scored by their mean")(lambda e: e.op("node_sum_1", "ReduceMin"))


@mutant("logits rounded to bfloat16")
def _(e: Editor) -> None:
    e.after("linear", "Cast", to=TensorProto.BFLOAT16)
    e.after("edited_1", "Cast", to=TensorProto.FLOAT)


@mutant("tokens of the router rounded to bfloat16")
def _(e: Editor) -> None:
    narrow = e.make("Cast", e.make("Cast", "view", to=TensorProto.BFLOAT16), to=TensorProto.FLOAT)
    e.read("node_linear", 0, narrow)


@mutant("scores rounded to float16")
def _(e: Editor) -> None:
    e.after("sigmoid", "Cast", to=TensorProto.FLOAT16)
    e.after("edited_1", "Cast", to=TensorProto.FLOAT)


@mutant("choices rounded to bfloat16")
def _(e: Editor) -> None:
    narrow = e.make("Cast", e.make("Cast", "add_9", to=TensorProto.BFLOAT16), to=TensorProto.FLOAT)
    e.read("node_masked_fill", 2, narrow)


@mutant("scores above a threshold only")
def _(e: Editor) -> None:
    kept = e.make("Where", e.make("Greater", "sigmoid", e.const(0.55)), "sigmoid", e.const(0.05))
    e.read("node_gather", 0, kept)


@mutant("logits capped")
def _(e: Editor) -> None:
    e.after("linear", "Clip", e.const(-0.5), e.const(0.5))


@mutant("logits capped where few are")
def _(e: Editor) -> None:
    e.after("linear", "Clip", e.const(-1.2), e.const(1.2))


# --- the weights ----------------------------------------------------------------------------------------------------

skips("scale forgotten", "node_mul_66")
skips("not normalised", "node_div")
reads("normalised over all experts", "node_sum_2", 0, "sigmoid")
mutant("divided by the largest weight")(lambda e: e.op("node_sum_2", "ReduceMax"))


@mutant("an epsilon under the weights")
def _(e: Editor) -> None:
    e.after("sum_2", "Add", e.const(0.3))


@mutant("weights not below one")
def _(e: Editor) -> None:
    e.after("sum_2", "Max", e.const(1.9))


@mutant("weights squared")
def _(e: Editor) -> None:
    e.after("mul_66", "Mul", "mul_66")


@mutant("weights in another order")
def _(e: Editor) -> None:
    ints = [e.const([i], np.int64) for i in (-1, -(1 << 62), 1, -1)]
    e.read("node_unsqueeze_3", 0, e.make("Slice", "mul_66", *ints))


# --- the experts ----------------------------------------------------------------------------------------------------


@mutant("gate and up swapped")
def _(e: Editor) -> None:
    e.read("node_GatherND_56", 0, "val_73")
    e.read("node_GatherND_79", 0, "val_50")


@mutant("down projections of the next experts")
def _(e: Editor) -> None:
    shifted = e.make("Mod", e.make("Add", "val_54", e.const(1, np.int64)), e.const(8, np.int64))
    e.read("node_GatherND_103", 1, shifted)


@mutant("the last expert never")
def _(e: Editor) -> None:
    capped = e.make("Clip", "val_54", e.const(0, np.int64), e.const(6, np.int64))
    for node in ("node_GatherND_56", "node_GatherND_79", "node_GatherND_103"):
        e.read(node, 1, capped)


@mutant("tokens turned about")
def _(e: Editor) -> None:
    ints = [e.const([i], np.int64) for i in (-1, -(1 << 62), 0, -1)]
    e.read("node_einsum_1", 0, e.make("Slice", "view", *ints))


reads("shared expert dropped", "node_add_156", 1, "view_2")
mutant("shared expert twice")(lambda e: e.after("linear_3", "Add", "linear_3") and None)
mutant("shared expert subtracted")(lambda e: e.op("node_add_156", "Sub"))
mutant("a gate without its sigmoid's argument")(lambda e: e.read("node_Sigmoid_80", 0, "einsum_1"))
mutant("the product before the down projection is a sum")(lambda e: e.op("node_mul_79", "Add"))
mutant("the best choice only")(lambda e: e.op("node_sum_3", "ReduceMax"))


@mutant("a rare clip of the result")
def _(e: Editor) -> None:
    e.after("sum_3", "Clip", e.const(-1.0), e.const(1.0))


@mutant("relu for silu")
def _(e: Editor) -> None:
    e.op("node_Sigmoid_80", "Relu")


# --- clamps ---------------------------------------------------------------------------------------------------------

skips("gate not clamped", "node_clamp", base=CLAMP)
skips("up not clamped", "node_clamp_1", base=CLAMP)
constant("another limit", "node_clamp", 2, 0.2, base=CLAMP)
constant("up clamped on one side further out", "node_clamp_1", 1, -0.1, base=CLAMP)
constant("gate clamped from below too", "node_clamp", 1, -0.1, base=CLAMP)


@mutant("clamped after the activation", CLAMP)
def _(e: Editor) -> None:
    e.skip("node_clamp")
    e.after("silu", "Clip", "", e.const(0.15))


@mutant("the product clamped", CLAMP)
def _(e: Editor) -> None:
    e.after("mul_83", "Clip", e.const(-0.1), e.const(0.1))


# --- loops ----------------------------------------------------------------------------------------------------------

mutant("an expert overwrites", LOOP)(lambda e: e.attributes("node_ScatterND_76", reduction="mul"))
mutant("the largest counts", LOOP)(lambda e: e.attributes("node_ScatterND_76", reduction="max"))
constant("an expert takes another's tokens", "node_eq_65", 1, 0, np.int64, base=LOOP)


@mutant("weights of another choice", LOOP)
def _(e: Editor) -> None:
    other = e.make("Mod", e.make("Add", "val_62", e.const(1, np.int64)), e.const(3, np.int64))
    e.read("node_Concat_63", 1, other)


@mutant("an expert is given tokens backwards", LOOP)
def _(e: Editor) -> None:
    ints = [e.const([i], np.int64) for i in (-1, -(1 << 62), 0, -1)]
    e.read("node_linear_4", 0, e.make("Slice", "val_94", *ints))


constant("an expert twice", "node_eq_59", 1, 0, np.int64, base=DENSE)
reads("an expert without its weight", "node_mul_87", 1, "linear_3", base=DENSE)
reads("an expert left out", "node_add_122", 1, "zeros_like_1", base=DENSE)
constant("rows of another expert", "node_eq_56", 1, 0, np.int64, base=PAIRS)
reads("an expert's rows thrown away", "node_where_1", 2, "zeros_like_1", base=PAIRS)
