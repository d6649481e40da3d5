"""Where one expert's choices are, in loops over experts: indices made of a mask, and what is taken at them."""

from __future__ import annotations

import onnx_ir as ir

from ..graph import attribute_int, is_op, static_dims
from .dense_weights import read_column
from .reader import Reader, last_dim
from .router import Router
from .weights import read_chosen


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
    column = r.attempt(read_column, router, base)
    if column is not None:
        # its weights are more than 0 where it was chosen; where one is as small as 0, nothing is added
        return column[0] if column[1].scale > 0.0 and column[1].eps >= 0.0 else None
    node = r.node(base, "ReduceMax", "ReduceSum")
    if node is None:
        return None
    source = node.inputs[0]
    if not r.reduces(node, -1) or last_dim(source) != router.top_k:
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


def index_columns(r: Reader, router: Router, value: ir.Value | None) -> list[tuple[Places, int]] | None:
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


def token_axis(r: Reader, router: Router, places: Places) -> int:
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


def taken_rows(r: Reader, router: Router, value: ir.Value | None, places: Places) -> ir.Value | None:
    """What rows are taken of at an expert's places: by token, or by choice of a flat list."""
    node = r.node(r.moved(value), "GatherND", "Gather")
    if node is None or node.inputs[0] is None:
        return None
    if node.op_type == "Gather" and not _along_tokens(node):
        return None
    columns = index_columns(r, router, node.inputs[1])
    if columns is None or len(columns) != 1 or columns[0][0].expert != places.expert:
        return None
    if places.rank == 2 and columns[0][1] != token_axis(r, router, places):
        return None
    return node.inputs[0]


def _along_tokens(node: ir.Node) -> bool:
    """Does a `Gather` take rows: along the first axis, or behind axes of one entry, as ``x[None, tokens]``?"""
    axis, dims = attribute_int(node, "axis", 0), static_dims(node.inputs[0]) if node.inputs[0] is not None else None
    if axis == 0:
        return True
    return dims is not None and axis % len(dims) == len(dims) - 2 and set(dims[:-2]) == {1}


def row_index(r: Reader, router: Router, node: ir.Node) -> list[tuple[Places, int]] | None:
    """The index of `ScatterElements` along the tokens' axis, one place spread over the channels."""
    if attribute_int(node, "axis", 0) != 0:
        return None
    found = read_places(r, router, node.inputs[1])
    return None if found is None or found[1] < 0 else [found]


def mark_counts(r: Reader, router: Router, updates: ir.Value | None, places: Places) -> None:
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
    expert = r.attempt(_chosen_at_all, router, node.inputs[0])
    if expert is None:
        expert = r.attempt(read_chosen, router, node.inputs[0])
    return True if expert == places.expert else None


def cut_to_places(r: Reader, updates: ir.Value | None, index: ir.Value | None) -> ir.Value | None:
    """Updates before a `Slice` that leaves as many as the index has, which older exporters put there."""
    found = None if updates is None or index is None else r.attempt(_before_cut, updates, index)
    return updates if found is None else found


def _before_cut(r: Reader, updates: ir.Value, index: ir.Value) -> ir.Value | None:
    node = r.node(r.moved(updates), "Slice")
    if node is None or len(node.inputs) < 3:
        return None
    starts, ends, axes, steps = [*node.inputs[1:], None, None][:4]
    given = [None if v is None else r.view.ints(v) for v in (starts, axes, steps)]
    if given[0] is None or any(given[0]) or set(given[2] or [1]) != {1}:
        return None
    if given[1] is not None and given[1] != list(range(len(given[1]))):
        return None
    size = r.node(r.moved(ends), "Gather", "Shape")
    if size is not None and size.op_type == "Gather":
        size = r.node(size.inputs[0], "Shape") if r.scalar(size.inputs[1]) == 0 and len(given[0]) == 1 else None
    return node.inputs[0] if size is not None and size.inputs[0] is index else None


def of_elements(r: Reader, columns: list[tuple[Places, int]]) -> Places | None:
    """Places in a list of rows, where an index has all channels of them: its mask is spread over the channels."""
    places = columns[0][0]
    if places.rank != 2 or [c for _, c in columns] != [0, 1] or any(p.node is not places.node for p, _ in columns):
        return None
    trail = [] if places.node.inputs[0] is None else r.trail(places.node.inputs[0])
    ranks = [len(v.shape) if v.shape is not None else 0 for v in trail]
    if 1 not in ranks or not any(rank == 2 and last_dim(v) == 1 for rank, v in zip(ranks, trail, strict=True)):
        return None
    return Places(places.expert, places.node, 1)
