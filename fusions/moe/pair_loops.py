"""Loops over experts that fill a row for each choice; the rows are weighted and summed at the end."""

from __future__ import annotations

import onnx_ir as ir

from ..graph import attribute_string
from .forms import Routed, choices_sum, linears, single
from .mlp import Mlp, read_mlp
from .places import cut_to_places, index_columns, mark_counts, of_elements, row_index, taken_rows
from .reader import Reader
from .router import Router
from .weights import read_chosen, read_weighting


def read_pair_loop(r: Reader, router: Router, value: ir.Value) -> Routed | None:
    """Every expert fills the rows of its choices; the rows are weighted and summed over choices at the end."""
    found = choices_sum(r, router, value)
    if found is None:
        return None
    for weights, rows in (found, found[::-1]):
        filled = r.attempt(_filled_rows, router, rows)
        if filled is None:
            continue
        weighting = read_weighting(r, router, weights)
        if weighting is not None:
            experts, inputs = filled
            return Routed("pair loop", experts, weighting, inputs, zero=router.experts - len(experts))
    return None


def _filled_rows(
    r: Reader, router: Router, value: ir.Value | None
) -> tuple[tuple[Mlp, ...], tuple[ir.Value, ...]] | None:
    experts: dict[int, Mlp] = {}
    inputs: list[ir.Value] = []
    current = r.moved(value)
    while current is not None and (node := r.node(current, "ScatterND", "ScatterElements", "Where")) is not None:
        if node.op_type == "Where":
            condition, output, before = node.inputs
            expert = r.attempt(read_chosen, router, condition)
            mlp = r.attempt(read_mlp, output)
            if expert is None or mlp is None or expert in experts or mlp.factors or not single(mlp):
                return None
            inputs += [x.x for x in linears(mlp)[1:]]
        else:
            before, index, output = node.inputs
            if attribute_string(node, "reduction", "none") != "none":
                return None
            columns = index_columns(r, router, index) if node.op_type == "ScatterND" else row_index(r, router, node)
            output = cut_to_places(r, output, index)
            mlp = r.attempt(read_mlp, output)
            if columns is None or mlp is None or mlp.factors or not single(mlp):
                return None
            places = of_elements(r, columns) or columns[0][0]
            mark_counts(r, router, output, places)
            expert = places.expert
            rows = [taken_rows(r, router, x.x, places) for x in linears(mlp)[1:]]
            if expert in experts or places.rank != 1 or places.tokens or any(x is None for x in rows):
                return None
            inputs += [x for x in rows if x is not None]
        experts[expert] = mlp
        current = r.moved(before)
    if not experts or sorted(experts) != list(range(len(experts))) or current is None:
        return None
    if len(experts) < router.experts:
        # rows that no expert writes hold what they were given
        inputs.append(current)
    elif not r.is_filled(current, 0.0):
        # every choice is some expert's, so what the rows held before does not matter; it must be harmless all the same
        return None
    return tuple(experts[i] for i in range(len(experts))), tuple(inputs)
