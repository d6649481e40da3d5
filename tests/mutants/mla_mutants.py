"""Wrong latent attention: each takes a right export and makes one mistake that people make.

Some are still latent attention with other parameters (another window, another epsilon); what matters is only that
fusing never changes what the edited model computes.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .editor import Editor

Edit = Callable[[Editor], None]
MUTANTS: dict[str, tuple[str, Edit]] = {}

PROMPT = "mla_half"  # any number of tokens, halves rotated, causal mask made in the graph
WINDOW = "mla_window_decode"  # one token on a cache of latents, a window of five
HUB = "mla_hub_sdpa_latent"  # one token on a cache of latents, gate, given mask, scale on both sides
EXPANDED = "mla_expanded"  # one token on a cache of keys and values
ABSORBED = "mla_absorbed"  # weights absorbed, one token on a cache of latents
PADDED = "mla_padding_eager"  # causal and padding mask


def mutant(base: str) -> Callable[[Edit], Edit]:
    """Register an edit of that export under its function's name."""

    def register(edit: Edit) -> Edit:
        MUTANTS[edit.__name__] = (base, edit)
        return edit

    return register


# ---- rotation


@mutant(PROMPT)
def keys_rotated_in_other_pairs(e: Editor) -> None:
    five = e.make("Reshape", "view_1", e.const([1, 1, -1, 2, 2], np.int64))
    turned = e.make("Transpose", five, perm=[0, 1, 2, 4, 3])
    other = e.make("Reshape", turned, e.const([1, 1, -1, 4], np.int64))
    for node in ("node_slice_3", "node_slice_4", "node_mul_106"):
        e.read(node, 0, other)


@mutant(PROMPT)
def keys_not_rotated(e: Editor) -> None:
    e.read("node_expand", 0, "view_1")


@mutant(PROMPT)
def queries_not_rotated(e: Editor) -> None:
    e.read("node_cat_3", 1, "split_with_sizes_split_1")


@mutant(PROMPT)
def cosine_and_sine_swapped_for_keys(e: Editor) -> None:
    e.read("node_mul_106", 1, "unsqueeze_1")
    e.read("node_mul_111", 1, "unsqueeze")


@mutant(PROMPT)
def cosine_and_sine_swapped(e: Editor) -> None:
    for node in ("node_mul_106", "node_mul_78"):
        e.read(node, 1, "unsqueeze_1")
    for node in ("node_mul_111", "node_mul_82"):
        e.read(node, 1, "unsqueeze")


@mutant(PROMPT)
def sine_of_the_other_sign_for_keys(e: Editor) -> None:
    e.after("mul_111", "Neg")


@mutant(PROMPT)
def minus_dropped_in_the_rotation(e: Editor) -> None:
    e.skip("node_neg")


@mutant(PROMPT)
def halves_not_exchanged(e: Editor) -> None:
    e.read("node_mul_82", 0, "split_with_sizes_split_1")


@mutant(PROMPT)
def rotation_of_the_wrong_channels(e: Editor) -> None:
    e.read("node_cat_3", 0, "add_82")
    e.read("node_cat_3", 1, "split_with_sizes_split_0")


@mutant(PROMPT)
def keys_one_position_on(e: Editor) -> None:
    later = e.make("Add", "val_31", e.const(1, np.int64))
    for table, unsqueeze, node in (("val_26", "node_mul_106", 0), ("val_35", "node_mul_111", 0)):
        rows = e.make("GatherND", table, later)
        e.read(unsqueeze, 1, e.make("Unsqueeze", rows, e.const([1], np.int64)))
        assert node == 0


# ---- scale, softmax


@mutant(PROMPT)
def scale_dropped(e: Editor) -> None:
    e.skip("node_mul_170")


@mutant(PROMPT)
def scale_on_the_nope_part_only(e: Editor) -> None:
    e.skip("node_mul_170")
    e.after("split_with_sizes_split_0", "Mul", e.const(0.2886751))


@mutant(PROMPT)
def scale_by_position(e: Editor) -> None:
    at = e.make("Cast", e.make("Add", "unsqueeze_2", e.const(1, np.int64)), to=1)
    e.after("matmul", "Mul", at)


@mutant(HUB)
def scale_on_one_side_only(e: Editor) -> None:
    e.skip("node_Mul_147")


@mutant(PROMPT)
def softmax_over_the_queries(e: Editor) -> None:
    e.attributes("node_softmax", axis=2)


@mutant(PROMPT)
def weights_squared(e: Editor) -> None:
    e.after("softmax", "Mul", "softmax")
    e.graph.node[-1].input[:] = ["softmax", "softmax"]


@mutant(PROMPT)
def scores_capped(e: Editor) -> None:
    e.after("mul_170", "Tanh")


@mutant(PROMPT)
def scores_clipped(e: Editor) -> None:
    e.after("mul_170", "Clip", e.const(-3.0), e.const(3.0))


# ---- masks


@mutant(PROMPT)
def mask_off_by_one(e: Editor) -> None:
    e.op("node_le_1", "Less")


@mutant(PROMPT)
def mask_sees_one_ahead(e: Editor) -> None:
    e.read("node_le_1", 1, e.make("Add", "unsqueeze_2", e.const(1, np.int64)))


@mutant(PROMPT)
def causal_dropped(e: Editor) -> None:
    e.skip("node_add_171")


@mutant(PROMPT)
def mask_transposed(e: Editor) -> None:
    e.op("node_le_1", "GreaterOrEqual")


@mutant(PROMPT)
def mask_that_leaves_something(e: Editor) -> None:
    e.read("node_where", 2, e.const(-2.0))


@mutant(PROMPT)
def mask_inverted(e: Editor) -> None:
    e.after("unsqueeze_5", "Not")


@mutant(PROMPT)
def masked_by_chunks(e: Editor) -> None:
    size = e.const(4, np.int64)
    chunks = [e.make("Div", v, size) for v in ("unsqueeze_3", "unsqueeze_2")]
    same = e.make("Equal", *chunks)
    e.read("node_Unsqueeze_160", 0, e.make("And", "le_1", same))


@mutant(PROMPT)
def far_keys_count_less(e: Editor) -> None:
    gap = e.make("Cast", e.make("Sub", "unsqueeze_3", "unsqueeze_2"), to=1)
    e.after("mul_170", "Add", e.make("Mul", gap, e.const(0.1)))


@mutant(PROMPT)
def first_key_always_seen(e: Editor) -> None:
    first = e.make("Equal", "unsqueeze_3", e.const(0, np.int64))
    e.read("node_Unsqueeze_160", 0, e.make("Or", e.make("Less", "unsqueeze_3", "unsqueeze_2"), first))


@mutant(PROMPT)
def causal_up_to_fifty_tokens(e: Editor) -> None:
    early = e.make("Less", "unsqueeze_2", e.const(50, np.int64))
    e.read("node_Unsqueeze_160", 0, e.make("Or", e.make("Not", early), "le_1"))


@mutant(WINDOW)
def window_off_by_one(e: Editor) -> None:
    e.op("node_gt", "GreaterOrEqual")


@mutant(WINDOW)
def window_of_the_far_side(e: Editor) -> None:
    e.op("node_gt", "LessOrEqual")


@mutant(WINDOW)
def window_from_the_start(e: Editor) -> None:
    e.read("node_gt", 1, e.const([[1]], np.int64))


@mutant(PADDED)
def padding_inverted(e: Editor) -> None:
    e.after("rest_0", "Not")


@mutant(PADDED)
def padding_of_queries(e: Editor) -> None:
    node = next(n for n in e.graph.node if n.op_type == "And")
    row = e.make("Unsqueeze", "rest_0", e.const([1, 3], np.int64))
    e.read(node.name, 1, row)


# ---- norm, weights, heads


@mutant(PROMPT)
def norm_eps_larger(e: Editor) -> None:
    e.read("node_add_31", 1, e.const(1e-2))


@mutant(PROMPT)
def norm_eps_outside_the_root(e: Editor) -> None:
    e.skip("node_add_31")
    e.after("val_19", "Add", e.const(1e-6))


@mutant(PROMPT)
def norm_over_the_rotary_part_too(e: Editor) -> None:
    e.read("node_pow_1", 0, "linear_1")


@mutant(PROMPT)
def norm_by_sum(e: Editor) -> None:
    e.op("node_mean", "ReduceSum")


@mutant(PROMPT)
def norm_dropped(e: Editor) -> None:
    e.read("node_linear_2", 0, "split_with_sizes_1_split_0")


@mutant(PROMPT)
def keys_and_values_exchanged(e: Editor) -> None:
    sizes = e.const([6, 8], np.int64)
    e.read("node_Split_139", 1, sizes)
    e.read("node_cat_2", 0, "split_with_sizes_2_split_1")
    e.read("node_matmul_1", 1, "split_with_sizes_2_split_0")


@mutant(PROMPT)
def heads_interleaved(e: Editor) -> None:
    e.read("node_Reshape_157", 1, e.const([1, -1, 14, 3], np.int64))
    e.attributes("node_transpose_1", perm=[0, 3, 1, 2])


@mutant(PROMPT)
def values_of_the_next_head(e: Editor) -> None:
    e.after("split_with_sizes_2_split_1", "Gather", e.const([1, 2, 0], np.int64), axis=1)


@mutant(PROMPT)
def all_heads_share_a_key(e: Editor) -> None:
    e.after("cat_2", "Gather", e.const([0, 0, 0], np.int64), axis=1)


@mutant(PROMPT)
def queries_clipped(e: Editor) -> None:
    e.after("cat_3", "Clip", e.const(-6.0), e.const(6.0))


@mutant(PROMPT)
def values_clipped(e: Editor) -> None:
    e.after("split_with_sizes_2_split_1", "Clip", e.const(-2.0), e.const(2.0))


@mutant(PROMPT)
def keys_rounded(e: Editor) -> None:
    e.after("cat_2", "Round")


@mutant(PROMPT)
def values_rectified(e: Editor) -> None:
    e.after("split_with_sizes_2_split_1", "Relu")


@mutant(PROMPT)
def values_scaled(e: Editor) -> None:
    e.after("split_with_sizes_2_split_1", "Mul", e.const(1.5))


# ---- caches


@mutant(HUB)
def cache_of_keys_before_rotation(e: Editor) -> None:
    e.read("node_cat_3", 1, "transpose_1")


@mutant(HUB)
def new_token_first(e: Editor) -> None:
    for node in ("node_cat_2", "node_cat_3"):
        inputs = e.node(node).input
        inputs[:] = list(inputs)[::-1]


@mutant(HUB)
def latents_and_keys_in_different_order(e: Editor) -> None:
    inputs = e.node("node_cat_2").input
    inputs[:] = list(inputs)[::-1]


@mutant(HUB)
def cache_before_the_norm(e: Editor) -> None:
    e.read("node_cat_2", 1, "split_with_sizes_1_split_0")


@mutant(EXPANDED)
def cached_values_dropped(e: Editor) -> None:
    node = next(n for n in e.graph.node if n.op_type == "Concat" and "rest_1" in n.input)
    e.read(node.name, 0, e.make("Mul", "rest_1", e.const(0.0)))


@mutant(ABSORBED)
def absorbed_by_the_wrong_axis(e: Editor) -> None:
    node = [n for n in e.graph.node if n.op_type == "Einsum"][-1]
    weight = node.input[1]
    e.read(node.name, 1, e.const(np.roll(e.array(weight), 1, axis=0)))


@mutant(ABSORBED)
def absorbed_scale_on_one_part(e: Editor) -> None:
    node = [n for n in e.graph.node if n.op_type == "Einsum"][1]
    e.after(node.output[0], "Mul", e.const(0.5))


# ---- gate and end


@mutant(HUB)
def gate_dropped(e: Editor) -> None:
    e.skip("node_mul_37")


@mutant(HUB)
def gate_after_the_projection(e: Editor) -> None:
    e.skip("node_mul_37")
    one = e.make("Slice", "sigmoid", e.const([0], np.int64), e.const([1], np.int64), e.const([2], np.int64))
    old = e.node("node_linear_5").output[0]
    e.node("node_linear_5").output[0] = "projected"
    e.graph.node.append(
        type(e.node("node_linear_5"))(op_type="Mul", input=["projected", one], output=[old], name="node_gated")
    )


@mutant(HUB)
def gate_by_tanh(e: Editor) -> None:
    e.op("node_sigmoid", "Tanh")


@mutant(HUB)
def gate_by_hard_sigmoid(e: Editor) -> None:
    e.op("node_sigmoid", "HardSigmoid")


@mutant(HUB)
def gate_of_another_head(e: Editor) -> None:
    e.after("sigmoid", "Gather", e.const([1, 0, 2, 3], np.int64), axis=2)


@mutant(HUB)
def gate_twice(e: Editor) -> None:
    e.after("mul_37", "Mul", "unsqueeze_2")


@mutant(HUB)
def heads_in_another_order_at_the_end(e: Editor) -> None:
    e.after("transpose_5", "Gather", e.const([3, 2, 1, 0], np.int64), axis=2)
