"""Guards around an attention: against NaN, and against rows that no key counts for."""

from __future__ import annotations

import onnx_ir as ir

from ..graph import FLOAT_TYPES, GraphView, is_op, rank_of


def nan_guard(view: GraphView, value: ir.Value) -> tuple[set[ir.Node], ir.Value] | None:
    """(nodes, result) of `Where(IsNaN(value), 0, value)`, where nothing else reads the value.

    The question may be asked of the value in 16 bits: weights of a softmax, and their means, don't become NaN by that.
    """
    users = view.users(value)
    if len(users) != 2:
        return None
    for asked in users:
        nodes, guard = {asked}, asked
        if is_op(asked, "Cast"):
            inner = view.users(asked.outputs[0])
            if len(inner) != 1 or asked.outputs[0].dtype not in FLOAT_TYPES:
                continue
            guard = inner[0]
            nodes.add(guard)
        where = next((u for u in users if u is not asked), None)
        if where is None or not is_op(guard, "IsNaN") or not is_op(where, "Where"):
            continue
        given = where.inputs[0] is guard.outputs[0] and view.users(guard.outputs[0]) == [where]
        if given and view.scalar(where.inputs[1]) == 0.0 and where.inputs[2] is value:
            return {*nodes, where}, where.outputs[0]
    return None


def is_row_guard(view: GraphView, kept: set[ir.Value], where: ir.Node, value: ir.Value) -> bool:
    """`Where(sum(mask) < 1, 0, o)` with the mask of the scores, whose truths are ``kept``."""
    if not is_op(where, "Where") or where.inputs[2] is not value or view.scalar(where.inputs[1]) != 0.0:
        return False
    less = None if where.inputs[0] is None else where.inputs[0].producer()
    if not is_op(less, "Less") or less is None or view.scalar(less.inputs[1]) not in (1.0, 0.5):
        return False
    total = None if less.inputs[0] is None else less.inputs[0].producer()
    if not is_op(total, "ReduceSum") or total is None:
        return False
    axes = view.ints(total.inputs[1]) if len(total.inputs) > 1 else None
    rank = None if total.inputs[0] is None else rank_of(total.inputs[0])
    if axes is None or rank is None or [a % rank for a in axes] != [rank - 1]:
        return False
    cast = None if total.inputs[0] is None else total.inputs[0].producer()
    return is_op(cast, "Cast") and cast is not None and cast.inputs[0] in kept


def row_nodes(where: ir.Node) -> set[ir.Node]:
    """The nodes that ask whether a row has a key."""
    less = where.inputs[0].producer()  # type: ignore[union-attr]
    total = less.inputs[0].producer()  # type: ignore[union-attr]
    cast = total.inputs[0].producer()  # type: ignore[union-attr]
    return {n for n in (less, total, cast) if n is not None}
