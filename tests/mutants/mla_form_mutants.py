"""More wrong latent attention: caches of one size, queries of two layers."""

from __future__ import annotations

import numpy as np

from .editor import Editor
from .mla_mutants import MUTANTS, mutant

__all__ = ["MUTANTS"]

START = "mla_start"  # any number of tokens written into a cache of one size, from a given place on
LATENTS = "mla_deepseek_v3_static"  # transformers' static cache of latents, any number of tokens
BOTH = "mla_both_op23"  # causal and truths of keys, in an Attention node
SUM = "mla_sum"  # causal mask and one of keys, added
QUERIES = "mla_queries"  # a layer each for the queries' two parts, gate


# ---- static caches, places from one start on


@mutant(START)
def places_one_on(e: Editor) -> None:
    e.read("node_Unsqueeze_109", 0, e.make("Add", "add_133", e.const(1, np.int64)))


@mutant(START)
def keys_one_place_on(e: Editor) -> None:
    e.read("node_ScatterND_114", 1, e.make("Add", "val_109", e.const(1, np.int64)))


@mutant(START)
def places_falling(e: Editor) -> None:
    e.read("node_Unsqueeze_109", 0, e.make("Sub", "rest_0", "arange"))


@mutant(START)
def places_from_the_end(e: Editor) -> None:
    e.read("node_Unsqueeze_109", 0, e.make("Sub", "add_133", e.const(128, np.int64)))
    e.read("node_unsqueeze_2", 0, e.make("Sub", "add_133", e.const(1, np.int64)))


@mutant(START)
def mask_of_static_cache_from_zero(e: Editor) -> None:
    e.read("node_unsqueeze_2", 0, "arange")


@mutant(START)
def mask_of_static_cache_one_ahead(e: Editor) -> None:
    e.read("node_unsqueeze_2", 0, e.make("Add", "add_133", e.const(1, np.int64)))


@mutant(START)
def new_keys_of_other_heads(e: Editor) -> None:
    e.after("val_112", "Gather", e.const([1, 2, 0], np.int64), axis=2)


@mutant(START)
def static_cache_doubled(e: Editor) -> None:
    e.read("node_Transpose_123", 0, e.make("Mul", "rest_2", e.const(2.0)))


# ---- queries of two layers


@mutant(QUERIES)
def rotary_queries_scaled(e: Editor) -> None:
    e.after(e.node("node_cat_3").input[1], "Mul", e.const(0.5))


@mutant(QUERIES)
def rotary_queries_of_other_heads(e: Editor) -> None:
    e.after(e.node("node_cat_3").input[1], "Gather", e.const([2, 0, 1], np.int64), axis=1)


@mutant(QUERIES)
def rotary_queries_not_rotated(e: Editor) -> None:
    e.read("node_cat_3", 1, "transpose_1")


@mutant(QUERIES)
def queries_rectified(e: Editor) -> None:
    e.after(e.node("node_cat_3").input[0], "Relu")


# ---- masks of two parts


@mutant(BOTH)
def one_of_two_masks_is_enough(e: Editor) -> None:
    e.op(next(n.name for n in e.graph.node if n.op_type == "And"), "Or")


@mutant(BOTH)
def masks_that_differ(e: Editor) -> None:
    e.op(next(n.name for n in e.graph.node if n.op_type == "And"), "Xor")


@mutant(BOTH)
def keys_of_the_other_kind(e: Editor) -> None:
    first = e.const([True, *[False] * 56], np.bool_)
    e.after("rest_0", "Xor", e.make("Not", first))


@mutant(SUM)
def mask_of_keys_for_queries(e: Editor) -> None:
    e.after("rest_0", "Transpose", perm=[0, 1, 3, 2])


@mutant(SUM)
def mask_of_keys_scaled_by_position(e: Editor) -> None:
    e.after("rest_0", "Mul", e.make("Cast", "unsqueeze_2", to=1))


@mutant(SUM)
def masks_subtracted(e: Editor) -> None:
    e.op("node_add_217", "Sub")


@mutant(LATENTS)
def latents_one_place_on(e: Editor) -> None:
    node = next(n for n in e.graph.node if n.op_type == "ScatterND")
    e.read(node.name, 1, e.make("Add", node.input[1], e.const(1, np.int64)))


@mutant(LATENTS)
def cached_rotary_keys_negated(e: Editor) -> None:
    node = [n for n in e.graph.node if n.op_type == "ScatterND"][1]
    e.read(node.name, 0, e.make("Neg", node.input[0]))
