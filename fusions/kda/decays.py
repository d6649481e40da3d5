"""Bounds on exponents that switch nowhere, because log decays have one sign."""

from __future__ import annotations

import onnx_ir as ir

from ..candidate import Candidate
from ..graph import GraphView, is_op
from ..region import backward


def bounds_log_decays(view: GraphView, candidate: Candidate, node: ir.Node) -> bool:
    """An upper bound of 0 on an exponent that is made of log decays alone.

    Chunked forms write ``exp(min(G_i - G_j, 0))``. With the gate's formula recognised, log decays are never positive,
    so the sign of each such difference is the same for all inputs: the bound switches nowhere.
    """
    if not is_op(node, "Clip", "Min") or candidate.config.gate_activation == "none":
        return False
    bounds = [view.scalar(v) for v in node.inputs[1:] if v is not None]
    low_free = node.op_type == "Min" or len(node.inputs) < 2 or node.inputs[1] is None
    users = view.users(node.outputs[0])
    if bounds != [0.0] or not low_free or not users or not all(is_op(u, "Exp") for u in users):
        return False
    source = node.inputs[0]
    gate = {p.value for p in candidate.operands["g"].pieces}
    if source is None:
        return False
    borders = backward(view, [source], lambda v: v in gate or view.is_border(v)).borders
    return set(borders) <= gate
