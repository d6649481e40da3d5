"""More wrong latent attention: forms that are brought to others first, absorbed weights, scores of two products."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .editor import Editor

Edit = Callable[[Editor], None]

INVERSE = "mla_inverse_op23"  # RotaryEmbedding, a table of triangles, masked_fill
ONE = "mla_one_product"  # latent and rotary key in one cache, absorbed weights
BSHD = "mla_deepseek"  # [batch, tokens, heads, channels], a mask [tokens, keys]
SCATTER = "mla_scatter"  # one token, ScatterElements
TWO = "mla_two_products"  # scores are a sum of two products

#: (base, edit) by name.
MUTANTS: dict[str, tuple[str, Edit]] = {}


def mutant(base: str) -> Callable[[Edit], Edit]:
    def register(edit: Edit) -> Edit:
        MUTANTS[edit.__name__] = base, edit
        return edit

    return register


# ---- rotations by RotaryEmbedding


@mutant(INVERSE)
def queries_rotated_in_pairs(e: Editor) -> None:
    e.attributes("node_RotaryEmbedding_147", interleaved=1)


@mutant(INVERSE)
def keys_rotated_in_pairs(e: Editor) -> None:
    e.attributes("node_RotaryEmbedding_150", interleaved=1)


@mutant(INVERSE)
def keys_rotated_back(e: Editor) -> None:
    e.read("node_RotaryEmbedding_150", 2, e.make("Neg", "val_110"))


@mutant(INVERSE)
def queries_with_cosine_for_sine(e: Editor) -> None:
    e.read("node_RotaryEmbedding_147", 1, "val_108")
    e.read("node_RotaryEmbedding_147", 2, "val_107")


@mutant(INVERSE)
def half_of_the_rotary_part(e: Editor) -> None:
    for rotation in ("node_RotaryEmbedding_147", "node_RotaryEmbedding_150"):
        e.attributes(rotation, rotary_embedding_dim=2)
        for i in (1, 2):
            bounds = [e.const([n], np.int64) for n in (0, 1, 2)]
            e.read(rotation, i, e.make("Slice", e.node(rotation).input[i], *bounds))
    e.read("node_RotaryEmbedding_147", 1, e.make("Neg", e.node("node_RotaryEmbedding_147").input[1]))


@mutant(INVERSE)
def queries_rotated_twice(e: Editor) -> None:
    e.after("add_109", "RotaryEmbedding", "val_107", "val_108")


# ---- fills of what is hidden


@mutant(INVERSE)
def what_is_ahead_seen(e: Editor) -> None:
    table = np.triu(np.ones((1, 1, 64, 64)))
    table[..., 0] = 1
    e.read("node_slice_5", 0, e.const(table, e.array("seen").dtype))


@mutant(INVERSE)
def diagonal_hidden_too(e: Editor) -> None:
    table = np.tril(np.ones((1, 1, 64, 64)), -1)
    table[..., 0, 0] = 1
    e.read("node_slice_5", 0, e.const(table, e.array("seen").dtype))


@mutant(INVERSE)
def one_key_ahead_seen(e: Editor) -> None:
    e.read("node_slice_5", 0, e.const(np.tril(np.ones((1, 1, 64, 64)), 1), e.array("seen").dtype))


@mutant(INVERSE)
def one_pair_of_the_table_open(e: Editor) -> None:
    table = e.array("seen").copy()
    table[..., 3, 50] = 1
    e.read("node_slice_5", 0, e.const(table, table.dtype))


@mutant(INVERSE)
def filled_with_little(e: Editor) -> None:
    e.read("node_masked_fill", 1, e.const(-3.0))


@mutant(INVERSE)
def filled_with_zero(e: Editor) -> None:
    e.read("node_masked_fill", 1, e.const(0.0))


@mutant(TWO)
def filled_behind_a_scale(e: Editor) -> None:
    e.after("masked_fill", "Mul", e.const(0.5))


@mutant(TWO)
def rows_of_the_table_from_one_on(e: Editor) -> None:
    start, axis = e.const([1], np.int64), e.node("node_slice_9").input[3]
    end = e.make("Add", "val_1", e.const([1], np.int64))
    e.graph.node.remove(e.node("node_slice_9"))
    e.made += 1
    e.read("node_slice_10", 0, e.make("Slice", "seen", start, end, axis))


# ---- masks of fewer axes


@mutant(BSHD)
def mask_along_heads(e: Editor) -> None:
    first = e.make("Slice", "rest_2", *(e.const([n], np.int64) for n in (0, 1, 0)))
    e.read("node_add_253", 1, e.make("Unsqueeze", first, e.const([1], np.int64)))


@mutant(BSHD)
def mask_turned(e: Editor) -> None:
    e.read("node_unsqueeze_9", 0, e.make("Transpose", "rest_2", perm=[1, 0]))


@mutant(BSHD)
def mask_of_each_head(e: Editor) -> None:
    factors = e.const(np.array([1.0, 0.5, 2.0]).reshape(1, 3, 1))
    e.read("node_add_253", 1, e.make("Mul", "unsqueeze_9", factors))


@mutant(BSHD)
def mask_twice(e: Editor) -> None:
    e.after("add_253", "Add", "unsqueeze_9")


# ---- absorbed weights in one product


@mutant(ONE)
def values_from_the_fifth_channel_on(e: Editor) -> None:
    for i, n in ((1, 4), (2, 20)):
        e.read("node_slice_6", i, e.const([n], np.int64))


@mutant(ONE)
def latents_of_queries_scaled(e: Editor) -> None:
    e.after("matmul", "Mul", e.const(1.5))


@mutant(ONE)
def rotary_part_first(e: Editor) -> None:
    bounds = [[e.const([n], np.int64) for n in pair] for pair in ((0, 4, 3), (4, 20, 3))]
    parts = [e.make("Slice", "cat_4", *b) for b in bounds]
    e.read("node_matmul_1", 0, e.make("Concat", *parts[::-1], axis=3))


@mutant(ONE)
def values_of_other_heads(e: Editor) -> None:
    e.read("node_matmul_3", 1, e.make("Gather", "transpose_2", e.const([1, 0, 2], np.int64), axis=0))


@mutant(ONE)
def old_latents_as_values(e: Editor) -> None:
    e.read("node_slice_6", 0, e.make("Concat", "rest_2", e.make("Mul", "cat_1", e.const(2.0)), axis=2))


@mutant(TWO)
def rotary_scores_halved(e: Editor) -> None:
    e.read("node_add_215", 1, e.make("Mul", "matmul_1", e.const(0.5)))


@mutant(TWO)
def rotary_scores_taken_off(e: Editor) -> None:
    e.op("node_add_215", "Sub")


# ---- writes by ScatterElements


@mutant(SCATTER)
def latents_one_place_on(e: Editor) -> None:
    e.read("node_scatter", 1, e.make("Add", "expand", e.const(1, np.int64)))


@mutant(SCATTER)
def channels_at_places_of_their_own(e: Editor) -> None:
    e.read("node_scatter", 1, e.make("Sub", "expand", e.const(np.arange(16).reshape(1, 1, 16) % 2, np.int64)))


@mutant(SCATTER)
def latents_added_to_what_is_there(e: Editor) -> None:
    e.attributes("node_scatter", reduction="add")


@mutant(SCATTER)
def mask_one_place_short(e: Editor) -> None:
    e.op("node_le", "Less")


@mutant(SCATTER)
def mask_of_places_behind(e: Editor) -> None:
    e.op("node_le", "GreaterOrEqual")


@mutant(SCATTER)
def rotary_keys_written_along_channels(e: Editor) -> None:
    e.read("node_scatter_1", 1, e.make("Min", "expand_1", e.const(3, np.int64)))
    e.attributes("node_scatter_1", axis=2)
