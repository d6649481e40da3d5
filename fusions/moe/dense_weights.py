"""Weights of the choices laid out over all experts: by columns, scattered, as products with one-hot numbers."""

from __future__ import annotations

from dataclasses import replace

import onnx_ir as ir

from ..graph import attribute_int, attribute_string, static_dims
from .groups import LOWEST, read_one_hot
from .reader import Reader, last_dim
from .router import Router
from .stored import slice_of
from .weights import Weighting, is_ids, read_chosen, read_weighting


def read_dense(r: Reader, router: Router, value: ir.Value | None) -> Weighting | None:
    """Weights laid out over all experts, ``[.., E]``: 0 for those not chosen."""
    base = r.moved(value)
    node = r.node(base, "ScatterElements", "ReduceSum", "MatMul", "Einsum", "ScatterND", "Slice", "Split", *_SCORES)
    if node is None:
        return None
    if node.op_type in _SCORES:
        return _of_spread_logits(r, router, node)
    if node.op_type in ("Slice", "Split"):
        if router.bound is None or columns_of(r, router, node, base) != list(range(router.bound)):
            return None
        found = read_dense(r, replace(router, bound=None), node.inputs[0])
        return None if found is None else replace(found, own_only=True)
    if node.op_type == "ScatterElements":
        data, index, updates = node.inputs
        rank = len(data.shape) if data is not None and data.shape is not None else 2
        if attribute_string(node, "reduction", "none") not in ("none", "add"):
            return None
        if attribute_int(node, "axis", 0) % rank != rank - 1 or not r.is_filled(data, 0.0):
            return None
        return read_weighting(r, router, updates) if is_ids(r, router, index) else None
    if node.op_type == "ReduceSum":
        product = r.node(node.inputs[0], "Mul") if r.reduces(node, -2) else None
        return None if product is None else _hot_product(r, router, list(product.inputs))
    if node.op_type in ("MatMul", "Einsum") and len(node.inputs) == 2:
        return _hot_product(r, router, list(node.inputs))
    return None


_SCORES = ("Softmax", "Sigmoid")


def _of_spread_logits(r: Reader, router: Router, node: ir.Node) -> Weighting | None:
    """Scores of the chosen logits where they stood, minus infinity at all other places: 0 for those not chosen."""
    spread = r.node(r.moved(node.inputs[0]), "ScatterElements") if router.by_logits and router.bias is None else None
    if spread is None or node.op_type.lower() != router.function:
        return None
    data, index, updates = spread.inputs
    rank = len(data.shape) if data is not None and data.shape is not None else 2
    axes = [attribute_int(spread, "axis", 0) % rank, attribute_int(node, "axis", -1) % rank]
    if axes[0] != rank - 1 or (node.op_type == "Softmax" and axes[1] != rank - 1):
        return None
    if attribute_string(spread, "reduction", "none") != "none" or r.filled(data) not in LOWEST:
        return None
    if not is_ids(r, router, index) or r.moved(updates) is not router.values:
        return None
    return Weighting(norm=node.op_type == "Softmax")


def _hot_product(r: Reader, router: Router, operands: list[ir.Value | None]) -> Weighting | None:
    for hot, weights in (operands, operands[::-1]):
        found = r.attempt(read_one_hot, hot)
        if found is None or found[1] != router.experts or not is_ids(r, router, found[0]):
            continue
        return read_weighting(r, router, weights)
    return None


def columns_of(r: Reader, router: Router, node: ir.Node, value: ir.Value | None) -> list[int] | None:
    """Which columns of dense weights a `Slice` or `Split` takes along their last axis."""
    dims = static_dims(node.inputs[0]) if node.inputs[0] is not None else None
    if dims is None or dims[-1] != router.experts:
        return None
    if node.op_type == "Slice":
        found = slice_of(r.view, node, tuple(1 if d is None else d for d in dims))
        return None if found is None or found[0] != len(dims) - 1 else found[1]
    sizes = r.view.ints(node.inputs[1]) if len(node.inputs) > 1 and node.inputs[1] is not None else None
    if attribute_int(node, "axis", 0) % len(dims) != len(dims) - 1 or sizes is None or value is None:
        return None
    place = list(node.outputs).index(value)
    return list(range(sum(sizes[:place]), sum(sizes[: place + 1])))


def read_column(r: Reader, router: Router, value: ir.Value | None) -> tuple[int, Weighting] | None:
    """(expert, weights) of one expert's weight for every token."""
    base = r.moved(value)
    node = r.node(base, "Slice", "Gather", "Split", "ReduceSum")
    if node is None or base is None:
        return None
    if node.op_type == "ReduceSum":
        return _masked_sum(r, router, node)
    number = column_number(r, router, node, base)
    if number is None:
        return None
    found = r.attempt(read_dense, router, node.inputs[0])
    if found is not None:
        return number, found
    return None


def column_number(r: Reader, router: Router, node: ir.Node, value: ir.Value) -> int | None:
    """Which column of dense weights a node takes."""
    dims = static_dims(node.inputs[0]) if node.inputs[0] is not None else None
    if dims is None:
        return None
    if node.op_type == "Split":
        axis = attribute_int(node, "axis", 0) % len(dims)
        sizes = r.view.ints(node.inputs[1]) if len(node.inputs) > 1 and node.inputs[1] is not None else None
        even = sizes is None or set(sizes) == {1}
        if dims[axis] != router.experts or len(node.outputs) != router.experts or not even:
            return None
        return list(node.outputs).index(value)
    if node.op_type == "Gather":
        axis, index = attribute_int(node, "axis", 0) % len(dims), r.view.array(node.inputs[1])
        if dims[axis] != router.experts or index is None or index.size != 1:
            return None
        return int(index.reshape(-1)[0]) % router.experts
    found = slice_of(r.view, node, tuple(1 if d is None else d for d in dims))
    if found is None or dims[found[0]] != router.experts or len(found[1]) != 1:
        return None
    return found[1][0]


def _masked_sum(r: Reader, router: Router, node: ir.Node) -> tuple[int, Weighting] | None:
    """The sum over choices of the weights of those that are one expert's."""
    source = node.inputs[0]
    if not r.reduces(node, -1) or last_dim(source) != router.top_k:
        return None
    inner = r.node(r.moved(source), "Mul", "Where")
    if inner is None:
        return None
    if inner.op_type == "Where":
        condition, yes, no = inner.inputs
        expert = r.attempt(read_chosen, router, condition)
        if expert is None or not r.is_filled(no, 0.0):
            return None
        found = read_weighting(r, router, yes)
        return None if found is None else (expert, found)
    for mask, weights in (inner.inputs, inner.inputs[::-1]):
        expert = r.attempt(read_chosen, router, mask)
        if expert is not None:
            found = read_weighting(r, router, weights)
            return None if found is None else (expert, found)
    return None
