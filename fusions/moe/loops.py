"""Loops over experts that exporters unroll: each takes its tokens by index, or all of them by a mask."""

from __future__ import annotations

import onnx_ir as ir

from ..graph import attribute_int, attribute_string, is_op, static_dims
from .forms import Parts, Routed, choices_sum, linears
from .mlp import Mlp, read_mlp
from .reader import Reader, last_dim
from .router import Router
from .weights import Weighting, column_number, read_chosen, read_column, read_dense, read_weighting
from .zero import read_weighted_token


class Places:
    """Where one expert's choices are: a `NonZero` of the mask of its choices, and its columns. With ``tokens`` the mask
    is that of the tokens which chose it."""

    def __init__(self, expert: int, node: ir.Node, rank: int, tokens: bool = False) -> None:
        self.expert, self.node, self.rank, self.tokens = expert, node, rank, tokens


def read_places(r: Reader, router: Router, value: ir.Value | None) -> tuple[Places, int] | None:
    """(places, which coordinate) of an index that was taken from a `NonZero`: -1 for all coordinates."""
    which = -1
    current = value
    while current is not None:
        node = r.node(
            current,
            *("Squeeze", "Unsqueeze", "Slice", "Split", "Gather", "Transpose", "Reshape", "Cast", "Identity", "Expand"),
            "NonZero",
        )
        if node is None:
            return None
        if node.op_type == "NonZero":
            mask = node.inputs[0]
            rank = len(mask.shape) if mask is not None and mask.shape is not None else 0
            expert, tokens = r.attempt(read_chosen, router, mask), False
            if expert is None and (rank == 1 or (rank == 2 and which == -1)):
                expert, tokens = r.attempt(_chosen_at_all, router, mask), True
            if expert is None or rank == 0:
                return None
            return Places(expert, node, rank, tokens), 0 if rank == 1 else which
        if node.op_type in ("Slice", "Gather", "Split"):
            number = _coordinate(r, node, current)
            if number is None or which not in (-1, number):
                # the coordinates are one axis: a second pick would pick places
                return None
            which = number
        current = node.inputs[0]
    return None


def _chosen_at_all(r: Reader, router: Router, value: ir.Value | None) -> int | None:
    """Which expert, of a mask over the tokens that is true where any of a token's choices is this expert."""

    def uncast(inner: ir.Value | None) -> ir.Value | None:
        inner = r.moved(inner)
        while (cast := r.node(inner, "Cast")) is not None:
            inner = r.moved(cast.inputs[0])
        return inner

    base = uncast(value)
    greater = r.node(base, "Greater")
    if greater is not None:
        if r.scalar(greater.inputs[1]) != 0.0:
            return None
        base = uncast(greater.inputs[0])
    node = r.node(base, "ReduceMax", "ReduceSum")
    if node is None:
        return None
    axes, source = r.axes(node), node.inputs[0]
    rank = len(source.shape) if source is not None and source.shape is not None else 0
    if axes is None or rank == 0 or [a % rank for a in axes] != [rank - 1] or last_dim(source) != router.top_k:
        return None
    return read_chosen(r, router, source)


def _coordinate(r: Reader, node: ir.Node, value: ir.Value) -> int | None:
    """Which coordinate a node takes of the places `[count, rank]` or `[rank, count]`."""
    if node.op_type == "Split":
        return list(node.outputs).index(value)
    if node.op_type == "Gather":
        index = r.view.array(node.inputs[1])
        return int(index.reshape(-1)[0]) if index is not None and index.size == 1 else None
    given = [r.view.ints(v) if v is not None else None for v in node.inputs[1:3]]
    if given[0] is None or given[1] is None or len(given[0]) != 1 or given[1][0] != given[0][0] + 1:
        return None
    return given[0][0]


def _columns(r: Reader, router: Router, value: ir.Value | None) -> list[tuple[Places, int]] | None:
    """The coordinates of an index, in order: one, several joined, or all."""
    base = value
    while (node := r.node(base, "Unsqueeze", "Cast", "Identity")) is not None:
        base = node.inputs[0]
    node = r.node(base, "Concat")
    if node is not None:
        found = [read_places(r, router, v) for v in node.inputs]
        return None if any(f is None or f[1] < 0 for f in found) else [f for f in found if f is not None]
    single = r.attempt(read_places, router, value)
    if single is None:
        return None
    if single[1] >= 0:
        return [single]
    return [(single[0], i) for i in range(single[0].rank)]


def _token_axis(r: Reader, router: Router, places: Places) -> int:
    """Which coordinate is the token: the mask is `[tokens, choices]`, or transposed."""
    mask = places.node.inputs[0]
    dims = static_dims(mask) if mask is not None else None
    if dims is None or places.rank != 2:
        return 0
    # the choices' axis has top_k entries; where both have, the mask of ids as they stand has tokens first
    if dims[1] == router.top_k and dims[0] != router.top_k:
        return 0
    if dims[0] == router.top_k and dims[1] != router.top_k:
        return 1
    return 0 if _untransposed(r, mask) else 1


def _untransposed(r: Reader, value: ir.Value | None) -> bool:
    while value is not None:
        producer = value.producer()
        if producer is None or producer.op_type == "Equal":
            return True
        if producer.op_type == "Transpose":
            return False
        value = producer.inputs[0]
    return True


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
    columns = _columns(r, router, index) if node.op_type == "ScatterND" else _row_index(r, router, node)
    if columns is None or data is None:
        return None
    places, which = columns[0]
    if places.tokens and places.rank == 2:  # ``out[mask] = ...``: all channels of the rows, one by one
        if [c for _, c in columns] != [0, 1] or any(p.node is not places.node for p, _ in columns):
            return None
        _mark_counts(r, router, node.inputs[2], places)
    elif len(columns) != 1 or (places.rank == 2 and which != _token_axis(r, router, places)):
        return None
    added = _added(r, router, node, data, places)
    read = None if added is None else r.attempt(_update, router, added, places)
    return None if read is None else (places.expert, *read, data)


def _mark_counts(r: Reader, router: Router, updates: ir.Value | None, places: Places) -> None:
    """Understand what says how many rows of updates there are: how many tokens the mask has."""
    for moved in [] if updates is None else r.trail(updates):
        expand = moved.producer()
        sizes = r.node(expand.inputs[1], "Concat") if is_op(expand, "Expand") and expand is not None else None
        for size in [] if sizes is None else sizes.inputs:
            r.attempt(_count, router, size, places)


def _count(r: Reader, router: Router, value: ir.Value | None, places: Places) -> bool | None:
    node = r.node(r.moved(value), "ReduceSum")
    if node is None or r.axes(node) is not None:
        return None
    return True if _chosen_at_all(r, router, node.inputs[0]) == places.expert else None


def _row_index(r: Reader, router: Router, node: ir.Node) -> list[tuple[Places, int]] | None:
    """The index of `ScatterElements` along the tokens' axis, one place spread over the channels."""
    if attribute_int(node, "axis", 0) != 0:
        return None
    found = read_places(r, router, node.inputs[1])
    return None if found is None or found[1] < 0 else [found]


def _added(r: Reader, router: Router, node: ir.Node, data: ir.Value, places: Places) -> ir.Value | None:
    """What is added at the places: the updates, or their difference from what was there."""
    updates = node.inputs[2]
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
        if r.attempt(_taken, router, before, places) is data:
            return term
    return None


def _taken(r: Reader, router: Router, value: ir.Value | None, places: Places) -> ir.Value | None:
    """What rows are taken of at an expert's places: by token, or by choice of a flat list."""
    node = r.node(r.moved(value), "GatherND", "Gather")
    if node is None or node.inputs[0] is None:
        return None
    if node.op_type == "Gather" and attribute_int(node, "axis", 0) != 0:
        return None
    columns = _columns(r, router, node.inputs[1])
    if columns is None or len(columns) != 1 or columns[0][0].expert != places.expert:
        return None
    if places.rank == 2 and columns[0][1] != _token_axis(r, router, places):
        return None
    return node.inputs[0]


def _update(
    r: Reader, router: Router, value: ir.Value, places: Places
) -> tuple[Mlp | None, Weighting, list[ir.Value]] | None:
    node = r.node(r.moved(value), "Mul")
    if node is None:
        return None
    for output, weight in (node.inputs, node.inputs[::-1]):
        weighting = r.attempt(_taken_weights, router, weight, places)
        if weighting is None:
            continue
        mlp = r.attempt(read_mlp, output)
        given = r.attempt(_taken, router, output, places) if mlp is None else None
        if given is not None:
            return None, weighting, [given]
        if mlp is None or mlp.factors or not single(mlp):
            return None
        rows = [_taken(r, router, x, places) for x in {mlp.gate.linear.x, *([mlp.up.linear.x] if mlp.up else [])}]
        if any(x is None for x in rows):
            return None
        return mlp, weighting, [x for x in rows if x is not None]
    return None


def single(mlp: Mlp) -> bool:
    """Has the expert weights of its own, no stack of them?"""
    return all(x.expert is None and x.ids is None for x in linears(mlp))


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
    columns = _columns(r, router, node.inputs[1])
    if columns is None or any(p.expert != places.expert for p, _ in columns):
        return None
    if node.op_type == "Gather" and attribute_int(node, "axis", 0) != 0:
        return None
    token = _token_axis(r, router, places)
    if places.rank == 2 and [c for _, c in columns] != [token, 1 - token]:
        return None
    return read_weighting(r, router, node.inputs[0])


def _taken_column(r: Reader, router: Router, value: ir.Value | None, places: Places) -> Weighting | None:
    """The expert's column of weights over all experts, at its tokens; rows are taken before the column or after it."""
    rows = r.attempt(_taken, router, value, places)
    found = None if rows is None else r.attempt(read_column, router, rows)
    if found is not None:
        return found[1] if found[0] == places.expert else None
    base = r.moved(value)
    node = r.node(base, "Gather", "Slice")
    number = None if node is None or base is None else column_number(r, router, node, base)
    if node is None or number != places.expert:
        return None
    dense = r.attempt(_taken, router, node.inputs[0], places)
    return None if dense is None else r.attempt(read_dense, router, dense)


def _flat_places(r: Reader, router: Router, value: ir.Value | None, places: Places) -> bool | None:
    """An index into flat weights: the token times the choices of a token, plus the choice."""
    add = r.node(r.moved(value), "Add")
    if add is None or places.rank != 2:
        return None
    token = _token_axis(r, router, places)
    for choice, rows in (add.inputs, add.inputs[::-1]):
        product = r.node(r.moved(rows), "Mul")
        if product is None:
            continue
        index = next((v for v in product.inputs if v is not None and not r.view.is_const(v)), None)
        count = next((r.scalar(v) for v in product.inputs if v is not None and r.view.is_const(v)), None)
        found = [r.attempt(_columns, router, v) for v in (index, choice)]
        if count != router.top_k or any(f is None or len(f) != 1 for f in found):
            continue
        (first, second) = (f[0] for f in found if f is not None)
        if first[0].expert == second[0].expert == places.expert and (first[1], second[1]) == (token, 1 - token):
            return True
    return None


# --- a row for each choice ------------------------------------------------------------------------------------------


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
    while current is not None and (node := r.node(current, "ScatterND", "Where")) is not None:
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
            columns = _columns(r, router, index)
            mlp = r.attempt(read_mlp, output)
            if columns is None or mlp is None or mlp.factors or not single(mlp):
                return None
            places = columns[0][0]
            expert = places.expert
            rows = [_taken(r, router, x.x, places) for x in linears(mlp)[1:]]
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
