"""Wrong KDA layers: each takes a right export and makes one mistake that people make.

Some of them are still KDA with other parameters (a different gate, reversed taps); what matters is only that fusing
never changes what the edited model computes.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .editor import Editor

Edit = Callable[[Editor], None]
MUTANTS: dict[str, tuple[str, Edit]] = {}

STEP = "kda_decode_T1"  # one token, hand-written, three convolutions, softplus gate, 4 heads of 16
PIECE = "chunk16_T32_beta2"  # two chunks of 16 tokens, states in and out, 3 heads of 8
BAILING = "bailing_bound3_decode"  # one token, packed convolution, bounded gate
BATCH = "bailing_dynbatch_decode"  # one token, symbolic batch
SCAN = "kda_scan_dynT"  # a Scan over any number of tokens


def mutant(base: str) -> Callable[[Edit], Edit]:
    """Register an edit of that export under its function's name."""

    def register(edit: Edit) -> Edit:
        MUTANTS[edit.__name__] = (base, edit)
        return edit

    return register


# ---- gates, scale and norms of one token


@mutant(STEP)
def forget_and_output_gate_swapped(e: Editor) -> None:
    e.read("node_add", 0, "linear_7")
    e.read("node_view_5", 0, "linear_4")


@mutant(STEP)
def scale_dropped(e: Editor) -> None:
    e.skip("node_mul_3")


@mutant(STEP)
def scale_applied_twice(e: Editor) -> None:
    e.after("einsum_1", "Mul", e.const(0.25))


@mutant(STEP)
def scale_on_the_key(e: Editor) -> None:
    e.skip("node_mul_3")
    e.after("mul_5", "Mul", e.const(0.25))


@mutant(STEP)
def eps_outside_the_root(e: Editor) -> None:
    e.skip("node_add_1")
    e.after("val_88", "Add", "val_87")


@mutant(STEP)
def eps_of_the_key_larger(e: Editor) -> None:
    e.read("node_add_2", 1, e.const(1e-3))


@mutant(STEP)
def l2norm_of_the_key_dropped(e: Editor) -> None:
    e.skip("node_mul_5")


@mutant(STEP)
def l2norm_over_the_heads(e: Editor) -> None:
    e.read("node_sum_2", 1, e.const([2], np.int64))


@mutant(STEP)
def l1_instead_of_l2(e: Editor) -> None:
    e.op("node_mul_4", "Abs")
    del e.node("node_mul_4").input[1:]
    e.skip("node_Sqrt_91")


@mutant(STEP)
def l2norm_squared(e: Editor) -> None:
    e.skip("node_Sqrt_91")


@mutant(STEP)
def key_norm_uses_the_query(e: Editor) -> None:
    e.read("node_mul_4", 0, "view")
    e.read("node_mul_4", 1, "view")


@mutant(STEP)
def exp_dropped(e: Editor) -> None:
    e.skip("node_exp_1")


@mutant(STEP)
def exp_of_base_two(e: Editor) -> None:
    e.after("select_3", "Mul", e.const(np.log(2.0)))


@mutant(STEP)
def decay_grows(e: Editor) -> None:
    e.after("neg", "Neg")


@mutant(STEP)
def one_head_decays_by_another(e: Editor) -> None:
    e.after("mul", "Gather", e.const([1, 0, 2, 3], np.int64), axis=2)


@mutant(STEP)
def decay_clipped(e: Editor) -> None:
    e.after("mul", "Clip", e.const(-0.5))


@mutant(STEP)
def dt_bias_dropped(e: Editor) -> None:
    e.skip("node_add")


@mutant(STEP)
def dt_bias_after_the_softplus(e: Editor) -> None:
    e.skip("node_add")
    e.after("softplus", "Add", e.const(e.array("dt_bias").reshape(4, 16)))


@mutant(STEP)
def softplus_threshold_low(e: Editor) -> None:
    e.read("n9", 1, e.const(0.5))


@mutant(STEP)
def softplus_branches_swapped(e: Editor) -> None:
    e.read("n10", 1, "tmp")
    e.read("n10", 2, "view_3")


@mutant(STEP)
def relu_instead_of_softplus(e: Editor) -> None:
    e.op("n3", "Relu")


@mutant(STEP)
def beta_by_softplus(e: Editor) -> None:
    e.op("node_sigmoid", "Softplus")


@mutant(STEP)
def beta_dropped(e: Editor) -> None:
    e.read("node_einsum", 0, "select_1")


@mutant(STEP)
def beta_doubled(e: Editor) -> None:
    e.after("sigmoid", "Mul", e.const(2.0))


@mutant(STEP)
def beta_on_the_output(e: Editor) -> None:
    e.read("node_einsum", 0, "select_1")
    e.after("einsum_1", "Mul", "unsqueeze_1")


@mutant(STEP)
def beta_on_the_value_only(e: Editor) -> None:
    e.read("node_einsum", 0, "select_1")
    e.after("select_2", "Mul", "unsqueeze_1")


# ---- the recurrence of one token


@mutant(STEP)
def queries_and_keys_swapped(e: Editor) -> None:
    for node, index in (("node_mul_7", 1), ("node_unsqueeze_2", 0)):
        e.read(node, index, "select")
    e.read("node_einsum_1", 0, "select_1")


@mutant(STEP)
def prediction_by_the_query(e: Editor) -> None:
    e.read("node_unsqueeze_2", 0, "select")


@mutant(STEP)
def decay_after_the_update(e: Editor) -> None:
    e.read("node_mul_8", 1, "s0")
    e.read("node_add_3", 0, "s0")
    added = e.node("node_add_3")
    added.output[0] = "undecayed"
    e.read("node_mul_6", 0, "undecayed")
    e.node("node_mul_6").output[0] = "add_3"


@mutant(STEP)
def prediction_from_the_undecayed_state(e: Editor) -> None:
    e.read("node_mul_8", 1, "s0")


@mutant(STEP)
def output_from_the_old_state(e: Editor) -> None:
    e.read("node_einsum_1", 1, "mul_6")


@mutant(STEP)
def update_without_prediction(e: Editor) -> None:
    e.skip("node_sub")


@mutant(STEP)
def update_sign_wrong(e: Editor) -> None:
    e.op("node_sub", "Add")


@mutant(STEP)
def state_transposed_on_entry(e: Editor) -> None:
    e.after("s0", "Transpose", perm=[0, 1, 3, 2])


@mutant(STEP)
def update_transposed(e: Editor) -> None:
    e.attributes("node_einsum", equation="bhk,bhv->bhvk")


@mutant(STEP)
def output_reads_the_state_transposed(e: Editor) -> None:
    e.attributes("node_einsum_1", equation="bhv,bhkv->bhk")


@mutant(STEP)
def decay_along_the_values(e: Editor) -> None:
    e.read("node_unsqueeze", 1, e.const([2], np.int64))


@mutant(STEP)
def state_clipped(e: Editor) -> None:
    e.after("mul_6", "Clip", e.const(-0.4), e.const(0.4))


@mutant(STEP)
def state_leaks(e: Editor) -> None:
    e.after("mul_6", "Add", e.make("Mul", "s0", e.const(1e-2)))


@mutant(STEP)
def heads_of_the_value_rolled(e: Editor) -> None:
    e.after("view_2", "Gather", e.const([1, 2, 3, 0], np.int64), axis=2)


@mutant(STEP)
def state_shared_by_the_heads(e: Editor) -> None:
    mean = e.make("ReduceMean", "s0", e.const([1], np.int64), keepdims=1)
    e.read("node_mul_6", 0, e.make("Expand", mean, e.const([1, 4, 16, 16], np.int64)))


@mutant(STEP)
def large_values_clipped(e: Editor) -> None:
    e.after("view_2", "Clip", e.const(-6.0), e.const(6.0))


@mutant(STEP)
def large_states_clipped(e: Editor) -> None:
    e.after("mul_6", "Clip", e.const(-100.0), e.const(100.0))


@mutant(STEP)
def large_outputs_clipped(e: Editor) -> None:
    e.after("einsum_1", "Clip", e.const(-12.0), e.const(12.0))


@mutant(STEP)
def large_updates_clipped(e: Editor) -> None:
    e.after("sub", "Clip", e.const(-100.0), e.const(100.0))


@mutant(STEP)
def small_values_flushed(e: Editor) -> None:
    e.after("view_2", "Mul", "kept")
    factor = e.graph.node[-1]
    large = e.make("Greater", e.make("Abs", "view_2"), e.const(1e-3))
    factor.input[1] = e.make("Cast", large, to=1)


# ---- convolution and gated norm of one token


@mutant(STEP)
def taps_reversed(e: Editor) -> None:
    e.read("node_Conv_149", 1, e.const(e.array("k_conv1d.weight")[..., ::-1].copy()))


@mutant(STEP)
def conv_state_not_moved_on(e: Editor) -> None:
    e.read("node_slice_2", 1, e.const([0], np.int64))
    e.read("node_slice_2", 2, e.const([3], np.int64))


@mutant(STEP)
def conv_state_of_another(e: Editor) -> None:
    e.read("node_cat_1", 0, "cq")


@mutant(STEP)
def relu_instead_of_silu(e: Editor) -> None:
    e.op("node_Sigmoid_37", "Relu")


@mutant(STEP)
def silu_on_the_query_only(e: Editor) -> None:
    e.skip("node_silu_1")
    e.skip("node_silu_2")


@mutant(STEP)
def norm_over_the_heads(e: Editor) -> None:
    e.read("node_mean", 1, e.const([2], np.int64))


@mutant(STEP)
def norm_over_all_heads_at_once(e: Editor) -> None:
    e.read("node_mean", 1, e.const([2, 3], np.int64))


@mutant(STEP)
def norm_subtracts_the_mean(e: Editor) -> None:
    e.after("select_scatter", "Sub", e.make("ReduceMean", "einsum_1", e.const([-1], np.int64), keepdims=1))


@mutant(STEP)
def norm_eps_outside_the_root(e: Editor) -> None:
    e.skip("node_add_4")
    e.after("val_116", "Add", e.const(1e-2))


@mutant(STEP)
def gate_before_the_norm(e: Editor) -> None:
    e.read("node_pow_1", 0, "gated_first")
    e.read("node_mul_9", 0, "gated_first")
    e.skip("node_mul_11")
    gated = e.make("Mul", "select_scatter", "sigmoid_1")
    for node in e.graph.node:
        node.input[:] = [gated if name == "gated_first" else name for name in node.input]


@mutant(STEP)
def gate_by_silu(e: Editor) -> None:
    e.after("sigmoid_1", "Mul", "view_5")


@mutant(STEP)
def gate_by_tanh(e: Editor) -> None:
    e.op("node_sigmoid_1", "Tanh")


@mutant(STEP)
def gate_plus_one(e: Editor) -> None:
    e.after("sigmoid_1", "Add", e.const(1.0))


@mutant(STEP)
def gate_of_another_head(e: Editor) -> None:
    e.after("view_5", "Gather", e.const([1, 2, 3, 0], np.int64), axis=2)


# ---- the chunked form


@mutant(PIECE)
def mask_includes_the_token_itself(e: Editor) -> None:
    e.read("node_tril", 1, e.const(0, np.int64))


@mutant(PIECE)
def mask_leaves_out_the_token_before(e: Editor) -> None:
    e.read("node_tril", 1, e.const(-2, np.int64))


@mutant(PIECE)
def output_mask_strict(e: Editor) -> None:
    e.read("node_tril_1", 1, e.const(-1, np.int64))


@mutant(PIECE)
def mask_row_too_late(e: Editor) -> None:
    mask = e.array("unsqueeze_3").copy()
    mask[7, 6] = True
    e.read("node_masked_fill", 0, e.const(mask, np.bool_))


@mutant(PIECE)
def one_substitution_row_skipped(e: Editor) -> None:
    e.skip("node_add_12")


@mutant(PIECE)
def last_substitution_row_skipped(e: Editor) -> None:
    e.skip("node_select_scatter_14")


@mutant(PIECE)
def substitution_sign_wrong(e: Editor) -> None:
    e.op("node_add_9", "Sub")


@mutant(PIECE)
def identity_missing(e: Editor) -> None:
    e.skip("node_add_18")


@mutant(PIECE)
def chunk_decays_by_its_first_token(e: Editor) -> None:
    e.read("node_slice_149", 1, e.const([0], np.int64))
    e.read("node_slice_149", 2, e.const([1], np.int64))


@mutant(PIECE)
def second_chunk_starts_from_the_first_state(e: Editor) -> None:
    e.read("node_matmul_6", 1, "past_state")
    e.read("node_matmul_7", 1, "past_state")


@mutant(PIECE)
def second_chunk_forgets_the_state(e: Editor) -> None:
    e.read("node_mul_33", 0, "past_state")


@mutant(PIECE)
def carried_state_not_decayed_in_the_output(e: Editor) -> None:
    e.read("node_matmul_7", 0, "select_126")


@mutant(PIECE)
def keys_not_decayed_to_the_end(e: Editor) -> None:
    e.skip("node_mul_34")


@mutant(PIECE)
def cumulative_sum_exclusive(e: Editor) -> None:
    e.attributes("node_cumsum", exclusive=1)


@mutant(PIECE)
def cumulative_sum_from_the_end(e: Editor) -> None:
    e.attributes("node_cumsum", reverse=1)


@mutant(PIECE)
def cumulative_sum_over_the_chunks(e: Editor) -> None:
    e.read("node_cumsum", 1, e.const([2], np.int64))


@mutant(PIECE)
def beta_on_the_rows(e: Editor) -> None:
    e.read("node_mul_25", 1, "unsqueeze_4")


@mutant(PIECE)
def chunks_out_of_order(e: Editor) -> None:
    e.node("node_stack").input[:] = ["val_1024", "val_1022"]


@mutant(PIECE)
def decay_difference_negated(e: Editor) -> None:
    e.node("node_sub").input[:] = ["unsqueeze_2", "unsqueeze_1"]


@mutant(PIECE)
def one_token_dropped(e: Editor) -> None:
    keep = np.ones((32, 1, 1), np.float32)
    keep[17] = 0
    e.after("mul_6", "Mul", e.const(keep[..., 0]))


# ---- the bounded gate and the packed convolution


@mutant(BAILING)
def bound_positive(e: Editor) -> None:
    e.read("node_mul_25", 1, e.const(3.0))


@mutant(BAILING)
def bound_smaller(e: Editor) -> None:
    e.read("node_mul_25", 1, e.const(-1.0))


@mutant(BAILING)
def bound_inside_the_sigmoid(e: Editor) -> None:
    e.skip("node_mul_25")
    e.after("mul_24", "Mul", e.const(-3.0))


@mutant(BAILING)
def rate_outside_the_sigmoid(e: Editor) -> None:
    e.skip("node_mul_24", 1)
    e.after("sigmoid", "Mul", "view_5")


@mutant(BAILING)
def bias_scaled_twice(e: Editor) -> None:
    e.after("mul_24", "Add", "view_4")


@mutant(BAILING)
def older_column_of_the_convolution(e: Editor) -> None:
    e.read("node_slice_2", 1, e.const([-2], np.int64))
    e.read("node_slice_2", 2, e.const([-1], np.int64))


@mutant(BAILING)
def packed_conv_state_not_moved_on(e: Editor) -> None:
    e.read("node_slice_1", 1, e.const([0], np.int64))
    e.read("node_slice_1", 2, e.const([4], np.int64))


@mutant(BAILING)
def parts_of_the_convolution_permuted(e: Editor) -> None:
    e.read("node_view", 0, "split_with_sizes_split_2")
    e.read("node_view_2", 0, "split_with_sizes_split_0")


# ---- the batch


@mutant(BATCH)
def every_sequence_starts_from_the_first_ones_state(e: Editor) -> None:
    first = e.make("Gather", "past.0.state", e.const([0], np.int64), axis=0)
    mixed = e.make("Add", e.make("Mul", "past.0.state", e.const(0.0)), first)
    own = {n.name for n in e.graph.node[-3:]}
    for node in e.graph.node:
        if node.name not in own:
            node.input[:] = [mixed if name == "past.0.state" else name for name in node.input]


@mutant(BATCH)
def sequences_share_one_convolution_state(e: Editor) -> None:
    mean = e.make("ReduceMean", "past.0.conv", e.const([0], np.int64), keepdims=1)
    zeros = e.make("Mul", "past.0.conv", e.const(0.0))
    mixed = e.make("Add", zeros, mean)
    own = {n.name for n in e.graph.node[-3:]}
    for node in e.graph.node:
        if node.name not in own:
            node.input[:] = [mixed if name == "past.0.conv" else name for name in node.input]


# ---- the Scan


@mutant(SCAN)
def scan_runs_backwards(e: Editor) -> None:
    e.attributes("node_scan__1", scan_input_directions=[1] * 5)


@mutant(SCAN)
def scan_writes_backwards(e: Editor) -> None:
    e.attributes("node_scan__1", scan_output_directions=[1])


@mutant(SCAN)
def scan_reads_one_input_backwards(e: Editor) -> None:
    e.attributes("node_scan__1", scan_input_directions=[0, 0, 1, 0, 0])


@mutant(SCAN)
def scan_reverses_the_value_channels(e: Editor) -> None:
    e.after("transpose_8", "Gather", e.const(np.arange(16)[::-1].copy(), np.int64), axis=3)


@mutant(SCAN)
def scan_carries_the_decayed_state_only(e: Editor) -> None:
    e.read("node_einsum_1", 1, "mul")


@mutant(SCAN)
def scan_state_scaled_each_step(e: Editor) -> None:
    e.read("node_mul_2", 1, "s0_scan_combine_graph_0__subgraph_in")
