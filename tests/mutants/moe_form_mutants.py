"""Mistakes in forms of mixtures of experts that came later: rows behind an axis of one entry, results scattered by
channel, masks of choices, one choice a token, the factor before or inside of the norm, sizes of the model's input."""

from __future__ import annotations

import numpy as np

from .editor import Editor
from .moe_graph_mutants import constant, mutant, reads, skips

NONE, SCATTERED, MASKED = "moe_legacy_none", "moe_legacy_scatter_add", "moe_mask_pairs"
ONE, SCALED, SHARED, BEHIND = "moe_top_one", "moe_scaled_norm", "moe_shared_norm", "moe_behind"

reads("rows taken by the number of the choice", "/Gather_1", 1, "/Squeeze_output_0", base=NONE)
reads("results added by the number of the choice", "/Unsqueeze_1", 0, "/Squeeze_1_output_0", base=SCATTERED)
mutant("results multiplied", SCATTERED)(lambda e: e.attributes("/ScatterElements", reduction="mul"))
constant("one expert in the place of another", "node_eq_61", 1, 2, np.int64, base=MASKED)
reads("divided by a sum of choices", "node_sum_2", 0, "topk_2__0", base=SCALED)
skips("the factor left out", "node_mul_62", base=SCALED)
constant("another factor", "node_mul_65", 1, 1.25, base=SHARED)
reads("the sum of the chosen choices", "node_sum_2", 0, "topk_2__0", base=SHARED)


@mutant("weights turned over", ONE)
def _(e: Editor) -> None:
    e.read("node_mul_29", 1, e.make("Sub", e.const(1.0), "getitem"))


@mutant("the next expert's gate", ONE)
def _(e: Editor) -> None:
    other = e.make("Mod", e.make("Add", "val_27", e.const(1, np.int64)), e.const(8, np.int64))
    e.read("node_GatherND_29", 1, other)


@mutant("half of the experts twice", ONE)
def _(e: Editor) -> None:
    half = e.make("Mod", "val_27", e.const(4, np.int64))
    for node in ("node_GatherND_29", "node_GatherND_52", "node_GatherND_76"):
        e.read(node, 1, half)


@mutant("divided twice", SHARED)
def _(e: Editor) -> None:
    e.read("node_mul_67", 1, e.make("Mul", "mul_65", "mul_65"))


@mutant("divided by the sum's negative", SHARED)
def _(e: Editor) -> None:
    e.read("node_reciprocal", 0, e.make("Neg", "sum_2"))


@mutant("a size that scales", BEHIND)
def _(e: Editor) -> None:
    """The number of tokens among the numbers, not among the sizes."""
    size = e.make("Div", e.make("Cast", "val_0", to=1), e.const(64.0))
    e.read("node_mul_72", 1, size)


# --- the weight before the down projection; scores by numbers of tokens and ids --------------------------------------

INSIDE, STACKED, INDEXED = "moe_where_inside", "moe_stacked_inside", "moe_indexed_scores"
skips("one expert without its weights", "node_mul_91", 1, base=INSIDE)
mutant("a mean over the experts", STACKED)(lambda e: e.op("node_sum_3", "ReduceMean"))
reads("masked choices at the ids", "node_GatherND_43", 0, "masked_fill", base=INDEXED)


@mutant("weights twice", INSIDE)
def _(e: Editor) -> None:
    e.read("node_linear_3", 0, e.make("Mul", "mul_91", "val_70"))


@mutant("weights in front of the gate", INSIDE)
def _(e: Editor) -> None:
    e.read("node_linear_1", 0, e.make("Mul", "val_61", "val_70"))
    e.skip("node_mul_91", 1)


@mutant("weights of those that were not chosen", STACKED)
def _(e: Editor) -> None:
    e.read("node_t_2", 0, e.make("Sub", e.const(1.0), "scatter_1"))


@mutant("scores of the first token", INDEXED)
def _(e: Editor) -> None:
    e.read("node_Concat_42", 0, e.make("Mul", "val_39", e.const(0, np.int64)))


# --- tokens whose weight is more than 0 -----------------------------------------------------------------------------

COLUMN = "moe_where_column"
constant("tokens whose weight is more than 0.8", "node_gt_3", 1, 0.8, base=COLUMN)
reads("tokens of another expert", "node_gt_3", 0, "select_2", base=COLUMN)


@mutant("a negative factor, and tokens whose weight is more than 0", COLUMN)
def _(e: Editor) -> None:
    """None are: only the shared expert is left."""
    e.read("node_mul_66", 1, e.const(-2.5))
