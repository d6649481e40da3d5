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
