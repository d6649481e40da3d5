"""Loops over experts that exporters unroll: each takes its tokens by index, or all of them by a mask."""

from __future__ import annotations

import onnx_ir as ir

from ..graph import attribute_int, attribute_string
from .dense_weights import column_number, read_column, read_dense
from .forms import Parts, Routed, inputs_of, single
from .mlp import Mlp, read_mlp
from .places import Places, cut_to_places, index_columns, mark_counts, row_index, taken_rows, token_axis
from .reader import Reader
from .router import Router
from .weights import Weighting, read_weighting
from .zero import read_weighted_token


def read_loop(r: Reader, router: Router, value: ir.Value) -> Routed | None:
    """``out[token] += expert(x[token]) * weight[token, choice]`` for each expert in turn."""
    parts = Parts(router)
    beside: list[ir.Value] = []
    stack: list[ir.Value | None] = [value]
    while stack:
        current = r.moved(stack.pop())
        if current is None:
            return None
        node = r.node(current, "ScatterND", "ScatterElements", "Add", "Sum")
        if node is None:
            if not r.is_filled(current, 0.0):
                beside.append(current)
            continue
        if node.op_type in ("Add", "Sum"):
            stack.extend(node.inputs)
            continue
        step = r.attempt(_step, router, current)
        if step is None or not parts.add(r, (step[0],), *step[1:4]):
            return None
        stack.append(step[4])
    for term in list(beside):  # experts without weights, outside of the loop
        given = r.attempt(read_weighted_token, router, term, parts)
        if given is not None and parts.add(r, given[0], None, given[1], (given[2],)):
            beside.remove(term)
    return parts.routed(r, "loop", "a loop over {} experts", tuple(beside))


def _step(
    r: Reader, router: Router, value: ir.Value
) -> tuple[int, Mlp | None, Weighting, list[ir.Value], ir.Value | None] | None:
    """(expert's number, expert, weights, what it reads, what it is added to) of one turn of the loop; without an expert
    where what it reads is what it gives."""
    node = r.node(value, "ScatterND", "ScatterElements")
    if node is None:
        return None
    data, index = node.inputs[:2]
    columns = index_columns(r, router, index) if node.op_type == "ScatterND" else row_index(r, router, node)
    if columns is None or data is None:
        return None
    places, which = columns[0]
    updates = cut_to_places(r, node.inputs[2], index)
    if places.tokens and places.rank == 2:  # ``out[mask] = ...``: all channels of the rows, one by one
        if [c for _, c in columns] != [0, 1] or any(p.node is not places.node for p, _ in columns):
            return None
        mark_counts(r, router, updates, places)
    elif len(columns) != 1 or (places.rank == 2 and which != token_axis(r, router, places)):
        return None
    added = _added(r, router, (node, updates), data, places)
    read = None if added is None else r.attempt(_update, router, added, places)
    return None if read is None else (places.expert, *read, data)


def _added(
    r: Reader, router: Router, scatter: tuple[ir.Node, ir.Value | None], data: ir.Value, places: Places
) -> ir.Value | None:
    """What is added at the places: the updates, or their difference from what was there."""
    node, updates = scatter
    reduction = attribute_string(node, "reduction", "none")
    if reduction == "add":
        return updates
    if reduction != "none":
        return None
    # each token stands once in an expert's places, so reading, adding and writing back is adding
    term = r.attempt(_read_and_added, router, updates, data, places)
    if term is not None:
        return term
    return updates if r.is_filled(data, 0.0) else None


def _read_and_added(
    r: Reader, router: Router, updates: ir.Value | None, data: ir.Value, places: Places
) -> ir.Value | None:
    add = r.node(r.moved(updates), "Add")
    if add is None:
        return None
    for before, term in (add.inputs, add.inputs[::-1]):
        if r.attempt(taken_rows, router, before, places) is data:
            return term
    return None


def _update(
    r: Reader, router: Router, value: ir.Value, places: Places
) -> tuple[Mlp | None, Weighting, list[ir.Value]] | None:
    node = r.node(r.moved(value), "Mul")
    if node is None:  # the weight is a factor before the down projection
        mlp = r.attempt(read_mlp, value)
        weighting = None
        if mlp is not None and len(mlp.factors) == 1:
            weighting = r.attempt(_taken_weights, router, mlp.factors[0], places)
        return None if mlp is None or weighting is None else _with_rows(r, router, mlp, weighting, places)
    for output, weight in (node.inputs, node.inputs[::-1]):
        weighting = r.attempt(_taken_weights, router, weight, places)
        if weighting is None:
            continue
        mlp = r.attempt(read_mlp, output)
        given = r.attempt(taken_rows, router, output, places) if mlp is None else None
        if given is not None:
            return None, weighting, [given]
        return None if mlp is None or mlp.factors else _with_rows(r, router, mlp, weighting, places)
    return None


def _with_rows(
    r: Reader, router: Router, mlp: Mlp, weighting: Weighting, places: Places
) -> tuple[Mlp, Weighting, list[ir.Value]] | None:
    """An expert, and what its rows are taken of."""
    if not single(mlp):
        return None
    rows = [taken_rows(r, router, x, places) for x in dict.fromkeys(inputs_of(mlp))]
    return None if any(x is None for x in rows) else (mlp, weighting, [x for x in rows if x is not None])


def _taken_weights(r: Reader, router: Router, value: ir.Value | None, places: Places) -> Weighting | None:
    """The weights at an expert's places: by token and choice, or token first and then the choice, or flat."""
    if places.tokens:
        return _taken_column(r, router, value, places)
    node = r.node(r.moved(value), "GatherND", "Gather")
    if node is None:
        return None
    if node.op_type == "Gather" and attribute_int(node, "axis", 0) == 0:
        flat = r.attempt(_flat_places, router, node.inputs[1], places)
        if flat is not None:
            return read_weighting(r, router, node.inputs[0])
    columns = index_columns(r, router, node.inputs[1])
    if columns is None or any(p.expert != places.expert for p, _ in columns):
        return None
    if node.op_type == "Gather" and attribute_int(node, "axis", 0) != 0:
        return None
    token = token_axis(r, router, places)
    if places.rank == 2 and [c for _, c in columns] != [token, 1 - token]:
        return None
    return read_weighting(r, router, node.inputs[0])


def _taken_column(r: Reader, router: Router, value: ir.Value | None, places: Places) -> Weighting | None:
    """The expert's column of weights over all experts, at its tokens; rows are taken before the column or after it."""
    rows = r.attempt(taken_rows, router, value, places)
    found = None if rows is None else r.attempt(read_column, router, rows)
    if found is not None:
        return found[1] if found[0] == places.expert else None
    base = r.moved(value)
    node = r.node(base, "Gather", "Slice")
    number = None if node is None or base is None else column_number(r, router, node, base)
    if node is None or number != places.expert:
        return None
    dense = r.attempt(taken_rows, router, node.inputs[0], places)
    return None if dense is None else r.attempt(read_dense, router, dense)


def _flat_places(r: Reader, router: Router, value: ir.Value | None, places: Places) -> bool | None:
    """An index into flat weights: the token times the choices of a token, plus the choice."""
    add = r.node(r.moved(value), "Add")
    if add is None or places.rank != 2:
        return None
    token = token_axis(r, router, places)
    for choice, rows in (add.inputs, add.inputs[::-1]):
        product = r.node(r.moved(rows), "Mul")
        if product is None:
            continue
        index = next((v for v in product.inputs if v is not None and not r.view.is_const(v)), None)
        count = next((r.scalar(v) for v in product.inputs if v is not None and r.view.is_const(v)), None)
        found = [r.attempt(index_columns, router, v) for v in (index, choice)]
        if count != router.top_k or any(f is None or len(f) != 1 for f in found):
            continue
        (first, second) = (f[0] for f in found if f is not None)
        if first[0].expert == second[0].expert == places.expert and (first[1], second[1]) == (token, 1 - token):
            return True
    return None
