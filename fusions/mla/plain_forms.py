"""What the forms are that are written out first: rotations, an Einsum's letters, what leads to an attention."""

from __future__ import annotations

import onnx_ir as ir

from ..graph import attribute_float, attribute_int, is_op, rank_of
from .core import is_anchor, is_product


def operands_of(node: ir.Node) -> tuple[ir.Value, ir.Value, ir.Value, ir.Value | None] | None:
    """What is rotated, cosines, sines and places in them, of a ``RotaryEmbedding`` of ONNX or of ONNX Runtime."""
    x, *rest = [*node.inputs, None, None, None]
    if is_op(node, "RotaryEmbedding"):
        cos, sin, places = rest[:3]
    elif node.domain == "com.microsoft" and attribute_float(node, "scale", 1.0) == 1.0:
        places, cos, sin = rest[:3]
        if attribute_int(node, "is_packed_batching", 0) or places is None or rank_of(places) != 2:
            return None
    else:
        return None
    return None if x is None or cos is None or sin is None else (x, cos, sin, places)


def terms_of(equation: str) -> tuple[list[str], str]:
    """The operands' letters of an Einsum and its result's, or none."""
    left, _, right = equation.replace(" ", "").partition("->")
    return ([], "") if "." in equation else (left.split(","), right)


def leads_to_softmax(value: ir.Value) -> bool:
    """Are they probabilities, maybe cast or guarded?"""
    for _ in range(6):
        node = value.producer()
        if is_op(node, "Softmax"):
            return True
        if node is None or not is_op(node, "Cast", "Where", "Identity") or node.inputs[-1] is None:
            return False
        value = node.inputs[-1]
    return False


def feeds_attention(node: ir.Node) -> bool:
    """Reads an attention, by steps other than linear layers, what the node gives?"""
    stack, seen = [node], {node}
    while stack and len(seen) < 400:
        for user in (u for v in stack.pop().outputs for u, _ in v.uses()):
            if is_anchor(user) or (is_product(user) and any(v and leads_to_softmax(v) for v in user.inputs)):
                return True
            if user not in seen and not (is_op(user, "MatMul", "Gemm") and any(_is_weight(v) for v in user.inputs)):
                seen.add(user)
                stack.append(user)
    return False


def _is_weight(value: ir.Value | None) -> bool:
    return value is not None and value.producer() is None and value.const_value is not None
