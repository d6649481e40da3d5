"""More wrong KDA graphs: prompts in chunks and by Scan, bounded gates, batches."""

from __future__ import annotations

import numpy as np

from .editor import Editor
from .graph_mutants import BAILING, BATCH, MUTANTS, PIECE, SCAN, mutant

__all__ = ["MUTANTS"]

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
