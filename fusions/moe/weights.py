"""Experts' weights in the routing sense: how much of each chosen expert's result counts, however it is laid out."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from ..graph import attribute_int, static_dims
from .groups import read_one_hot
from .reader import Reader, last_dim
from .router import Router


@dataclass(frozen=True)
class Weighting:
    """Weights of the choices, ``[.., k]`` beside the router's ids."""

    norm: bool = False
    eps: float = 0.0
    scale: float = 1.0
    masked: bool = False
    least: float = 0.0  # of what they are divided by
    own_only: bool = False  # 0 for the choices of experts without weights


def is_ids(r: Reader, router: Router, value: ir.Value | None) -> bool:
    """Is a value the router's ids, moved at most? Where the router has a bound: some other expert's from there on."""
    level = r.marks.level()
    base = r.moved(value)
    wrapped = r.node(base, "Mod")
    if wrapped is not None and (r.scalar(wrapped.inputs[1]) or 0) >= router.experts:
        base = r.moved(wrapped.inputs[0])  # ids are no negative numbers
    if base is router.ids or (router.bound is not None and _bounded_ids(r, router, base)):
        return True
    r.marks.back(level)
    return False


def _bounded_ids(r: Reader, router: Router, value: ir.Value | None) -> bool:
    """Ids below the bound as they are, and any valid number for the others."""
    free, bound = replace(router, bound=None), router.bound
    assert bound is not None
    node = r.node(value, "Where", "Min", "Clip", "Mul")
    if node is None:
        return False
    if node.op_type == "Where":
        condition, yes, no = node.inputs
        split = read_split(r, free, condition)
        if split is None or split[0] != bound:
            return False
        own, other = (no, yes) if split[1] else (yes, no)
        number = r.filled(other)
        return is_ids(r, free, own) and number is not None and 0 <= number < bound
    if node.op_type == "Mul":
        for mask, ids in (node.inputs, node.inputs[::-1]):
            if r.attempt(read_split, free, mask) == (bound, False) and is_ids(r, free, ids):
                return True
        return False
    low, high = r.bounds(node)
    ids = next((v for v in node.inputs if v is not None and not r.view.is_const(v)), None)
    return low <= 0 and high == bound - 1 and is_ids(r, free, ids)


def read_split(r: Reader, router: Router, value: ir.Value | None) -> tuple[int, bool] | None:
    """(n, is it true from n on) of a mask over the choices: whether an expert's number is n or more, or less than n."""
    base = r.moved(value)
    while (cast := r.node(base, "Cast")) is not None:
        base = r.moved(cast.inputs[0])
    node = r.node(base, "GreaterOrEqual", "Greater", "Less", "LessOrEqual", "Not")
    if node is None:
        return None
    if node.op_type == "Not":
        inner = read_split(r, router, node.inputs[0])
        return None if inner is None else (inner[0], not inner[1])
    number = r.scalar(node.inputs[1])
    if number is None or number != int(number) or not is_ids(r, router, node.inputs[0]):
        return None
    return int(number) + (node.op_type in ("Greater", "LessOrEqual")), node.op_type.startswith("Greater")


def read_weighting(r: Reader, router: Router, value: ir.Value | None) -> Weighting | None:
    """The weights of the choices: chosen scores, normalised or not, scaled or not."""
    base = r.moved(value)
    if base is None:
        return None
    if base is router.values:
        if router.by_logits:
            r.refuse("weights are chosen logits as they are")
            return None
        if not router.values_are_scores:
            r.refuse("weights are chosen choices, biased or masked with minus infinity, not scores")
            return None
        return Weighting(masked=router.groups is not None)
    if router.bound is not None:
        own = r.attempt(_own_weights, router, base)
        if own is not None:
            return own
    node = r.node(
        base, "GatherElements", "GatherND", "Mul", "Div", *(("Softmax", "Sigmoid") if router.by_logits else ())
    )
    if node is None:
        return None
    if node.op_type in ("Softmax", "Sigmoid"):
        return _of_logits(r, router, node)
    if node.op_type in ("GatherElements", "GatherND"):
        return _chosen(r, router, node)
    first, second = node.inputs
    for inner, other in ((first, second), (second, first)):
        number = r.scalar(other)
        if number is None or (node.op_type == "Div" and inner is second):
            continue
        found = read_weighting(r, router, inner)
        factor = 1.0 / number if node.op_type == "Div" else number
        return None if found is None else _scaled(found, factor)
    if node.op_type == "Div":
        return _normalised(r, router, first, second)
    for inner, other in ((first, second), (second, first)):
        divisor = r.attempt(_divisor, other)
        if divisor is not None:
            found = _normalised(r, router, inner, divisor[1])
            return None if found is None else _scaled(found, divisor[0])
    return None


def _divisor(r: Reader, value: ir.Value | None) -> tuple[float, ir.Value] | None:
    """(number, total) of a number divided by a total: ``1 / total``, ``2.5 / total``, ``2.5 * (1 / total)``."""
    node = r.node(r.moved(value), "Reciprocal", "Div", "Mul")
    if node is None:
        return None
    first, second = [*node.inputs, None][:2]
    if node.op_type == "Reciprocal":
        return None if first is None else (1.0, first)
    if node.op_type == "Div":
        number = r.scalar(first)
        return None if number is None or second is None else (number, second)
    for factor, rest in ((first, second), (second, first)):
        number = r.scalar(factor)
        found = None if number is None else r.attempt(_divisor, rest)
        if number is not None and found is not None:
            return number * found[0], found[1]
    return None


def _own_weights(r: Reader, router: Router, value: ir.Value) -> Weighting | None:
    """Weights that are 0 from the router's bound on."""
    free = replace(router, bound=None)
    node = r.node(value, "Where", "Mul")
    if node is None:
        return None
    pairs = [(node.inputs[0], node.inputs[1], True), (node.inputs[1], node.inputs[0], True)]
    if node.op_type == "Where":
        condition, yes, no = node.inputs
        pairs = [(condition, yes, r.is_filled(no, 0.0)), (condition, no, r.is_filled(yes, 0.0))]
    for i, (mask, weights, others_zero) in enumerate(pairs):
        above = node.op_type == "Where" and i == 1
        if others_zero and r.attempt(read_split, free, mask) == (router.bound, above):
            found = read_weighting(r, free, weights)
            return None if found is None else replace(found, own_only=True)
    return None


def _scaled(w: Weighting, factor: float) -> Weighting:
    return replace(w, scale=w.scale * factor)


def _of_logits(r: Reader, router: Router, node: ir.Node) -> Weighting | None:
    """Scores of the chosen logits. The softmax of some numbers is that of all, divided by its sum over them."""
    source = node.inputs[0]
    base = r.moved(source)
    gather = r.node(base, "GatherElements") if base is not router.values else None
    if gather is not None:
        given = gather.inputs[0]
        rank = len(given.shape) if given is not None and given.shape is not None else 2
        if r.moved(given) is not r.moved(router.logits) or not is_ids(r, router, gather.inputs[1]):
            return None
        if attribute_int(gather, "axis", 0) % rank != rank - 1:
            return None
    elif base is not router.values or router.bias is not None:
        return None
    if node.op_type.lower() != router.function:
        return None
    if node.op_type == "Sigmoid":
        return Weighting()
    rank = len(source.shape) if source is not None and source.shape is not None else 0
    if rank == 0 or attribute_int(node, "axis", -1) % rank != rank - 1 or last_dim(source) != router.top_k:
        return None
    return Weighting(norm=True)


def _chosen(r: Reader, router: Router, node: ir.Node) -> Weighting | None:
    rank = len(node.inputs[0].shape) if node.inputs[0] is not None and node.inputs[0].shape is not None else 2
    if node.op_type == "GatherElements" and attribute_int(node, "axis", 0) % rank != rank - 1:
        return None
    if not picks_choices(r, router, node) or (node.op_type == "GatherND" and rank != 2):
        return None
    source = r.moved(node.inputs[0])
    if router.by_logits:
        return _of_all_logits(r, router, source)
    if source is router.scores:
        return Weighting()
    if source is r.moved(router.choice) and router.values_are_scores:
        return Weighting(masked=router.groups is not None)
    r.refuse("weights are taken from other numbers than the router's scores")
    return None


def _of_all_logits(r: Reader, router: Router, scores: ir.Value | None) -> Weighting | None:
    """Scores of all logits, of which some were taken."""
    node = r.node(scores, "Softmax", "Sigmoid")
    if node is None or scores is None or node.op_type.lower() != router.function:
        r.refuse("weights are taken from other numbers than the router's scores")
        return None
    rank = len(scores.shape or ())
    if node.op_type == "Softmax" and attribute_int(node, "axis", -1) not in (-1, rank - 1):
        return None
    return Weighting() if r.moved(node.inputs[0]) is r.moved(router.logits) else None


def _normalised(r: Reader, router: Router, value: ir.Value | None, total: ir.Value | None) -> Weighting | None:
    inner = read_weighting(r, router, value)
    if inner is None or inner.norm or inner.scale == 0.0 or inner.own_only:
        return None
    # sums and bounds in any order: max(sum + eps, least)
    eps, least, base = 0.0, 0.0, r.moved(total)
    while (step := r.node(base, "Add", "Clip", "Max")) is not None:
        numbers = [r.scalar(v) for v in step.inputs]
        if step.op_type == "Add":
            number = next((n for n in numbers if n is not None), None)
            if number is None:
                return None
            eps += number
        else:
            low, high = r.bounds(step)
            several = least or (step.op_type == "Max" and len(step.inputs) != 2)
            if several or not (math.isfinite(low) and low + eps >= 0.0 and high == math.inf):
                r.refuse("weights are divided by something else than their sum")
                return None
            least = low + eps
        base = r.moved(next((v for v in step.inputs if v is not None and r.scalar(v) is None), None))
    node = r.node(base, "ReduceSum", "ReduceL1")
    if node is None:
        r.refuse("weights are divided by something else than their sum")
        return None
    source = node.inputs[0]
    summed: Weighting | None = inner
    if r.moved(source) is not r.moved(value):  # the same scores, scaled otherwise
        summed = r.attempt(read_weighting, router, source)
    if not r.reduces(node, -1) or summed is None or summed != replace(inner, scale=summed.scale) or summed.scale == 0.0:
        r.refuse("weights are divided by the sum of other numbers than the chosen scores")
        return None
    # scores are not negative, so the sum of their sizes is their sum
    if (least or node.op_type == "ReduceL1") and summed.scale < 0.0:
        r.refuse("weights that are scaled by a negative number are divided by a sum with a bound")
        return None
    # t w / max(sum of s w + eps, least) = t / s w / max(sum of w + eps / s, least / s)
    scale = summed.scale
    return Weighting(True, eps / scale, inner.scale / scale, inner.masked, least / scale)


def _class_of(r: Reader, node: ir.Node, value: ir.Value) -> int | None:
    """Which one of the classes a `Gather` takes, or a `Split` into single ones gives."""
    if node.op_type == "Gather":
        index = r.view.array(node.inputs[1])
        return int(index.reshape(-1)[0]) if index is not None and index.size == 1 else None
    sizes = r.view.ints(node.inputs[1]) if len(node.inputs) > 1 and node.inputs[1] is not None else None
    dims = static_dims(value)
    axis = attribute_int(node, "axis", 0) % len(dims) if dims else 0
    single = set(sizes) == {1} if sizes is not None else dims is not None and dims[axis] == 1
    return list(node.outputs).index(value) if single else None


def read_chosen(r: Reader, router: Router, value: ir.Value | None) -> int | None:
    """Which expert, of a mask over the choices that is true where they are this expert."""
    base = r.moved(value)
    while (cast := r.node(base, "Cast")) is not None:
        base = r.moved(cast.inputs[0])
    node = r.node(base, "Equal", "Gather", "Split")
    if node is None or base is None:
        return None
    if node.op_type in ("Gather", "Split"):
        # one class of a one-hot tensor, its axes in any order
        data, chosen = node.inputs[0], _class_of(r, node, base)
        dims = static_dims(data) if data is not None else None
        if chosen is None or dims is None or data is None:
            return None
        axis = attribute_int(node, "axis", 0) % len(dims)
        hot = r.attempt(read_one_hot, r.moved(data))
        if hot is None or hot[1] != router.experts or dims[axis] != router.experts or not is_ids(r, router, hot[0]):
            return None
        return chosen % router.experts
    for ids, number in (node.inputs, node.inputs[::-1]):
        array = r.view.array(number)
        if array is not None and array.size == 1 and is_ids(r, router, ids):
            return int(np.asarray(array).reshape(-1)[0])
    return None


def picks_choices(r: Reader, router: Router, node: ir.Node) -> bool:
    """Does a node gather by the router's ids, or by a token's number and its ids: ``y[arange(N)[:, None], ids]``?"""
    if node.op_type == "GatherElements":
        return is_ids(r, router, node.inputs[1])
    index = r.node(node.inputs[1], "Concat")
    if index is None or len(index.inputs) != 2 or attribute_int(node, "batch_dims", 0):
        return False
    tokens = r.node(r.moved(index.inputs[0]), "Range")
    counted = tokens is not None and r.scalar(tokens.inputs[0]) == 0 and r.scalar(tokens.inputs[2]) == 1
    return counted and is_ids(r, router, index.inputs[1])
