"""One proof serves all layers of one structure: a layer that differs in a mere constant is not of that structure."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
import pytest
from deltafuse.fusions.pipeline import fuse_model
from exports import library

from .editor import Editor

DECODE, PROMPT = "hybrid4_decode", "hybrid4_prefill"


def constant(node: str, index: int, value: float) -> Callable[[Editor], None]:
    """Another number in one place of the middle layer."""
    return lambda e: e.read(node, index, e.const(value))


def axes(node: str, value: int) -> Callable[[Editor], None]:
    return lambda e: e.read(node, 1, e.const([value], np.int64))


def hole(node: str) -> Callable[[Editor], None]:
    """The middle layer's mask hides token 10 from token 11."""

    def edit(e: Editor) -> None:
        mask = e.array(e.node(node).input[0]).copy()
        mask[11, 10] = True
        e.read(node, 0, e.const(mask, np.bool_))

    return edit


def start_state(e: Editor) -> None:
    """The middle layer starts from a constant that is not zero."""
    state = e.const(np.full((1, 3, 8, 8), 0.2))
    for node in e.graph.node:
        if node.op_type == "MatMul" and node.name in ("node_matmul_8", "node_matmul_9"):
            node.input[1] = state


def rates_negative(e: Editor) -> None:
    e.read("node_mul_44", 0, e.const(-e.array("view_13")))


EDITS: dict[str, tuple[str, Callable[[Editor], None]]] = {
    "eps_of_the_key": (DECODE, constant("node_add_34", 1, 1e-2)),
    "scale": (DECODE, constant("node_mul_48", 1, 1.0)),
    "lower_bound": (DECODE, constant("node_mul_45", 1, -2.0)),
    "norm_eps": (DECODE, constant("node_add_36", 1, 0.1)),
    "norm_exponent": (DECODE, constant("node_pow_5", 1, 4.0)),
    "output_axis": (DECODE, axes("node_sum_8", -1)),
    "norm_axis": (DECODE, axes("node_sum_6", 2)),
    "rates_negative": (DECODE, rates_negative),
    "mask_of_the_decays": (PROMPT, hole("node_masked_fill_3")),
    "mask_of_the_updates": (PROMPT, hole("node_masked_fill_4")),
    "mask_of_the_output": (PROMPT, hole("node_masked_fill_5")),
    "start_state": (PROMPT, start_state),
}


@pytest.mark.parametrize("name", EDITS)
def test_a_layer_with_another_constant_does_not_ride_on_a_proof(name: str) -> None:
    base, edit = EDITS[name]
    original = library.export(base).proto()
    editor = Editor(original)
    edit(editor)
    mutated = editor.done()
    feeds = library.export(base).feeds()
    truth = library.run(mutated, feeds)
    assert library.worst(truth, library.run(original, feeds))[0] > 1e-3, "the edit changes nothing"
    report = fuse_model(ir.from_proto(mutated))
    assert report.model is not None
    assert report.count("kda") >= 2, "the layers beside it are right"
    error, output = library.worst(library.run(report.model, feeds), truth)
    assert error <= 1e-4, f"{[r.status for r in report.regions]}: {output} is off by {error:.1e}"
