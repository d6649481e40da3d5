"""Groups of experts: those that stay, from the mask of the choices back to the groups' scores."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from ..graph import attribute_int, attribute_string
from .reader import Reader, last_dim

#: Fills that mean minus infinity to every float type that scores are computed in.
LOWEST = (-math.inf, float(np.finfo(np.float32).min), -3.3895313892515355e38, -65504.0)
#: Scores are 0 or more, so any number below all biases does for choices as minus infinity does (``low_bias`` looks at
#: the biases). Numbers above this one are in reach of the biases that proofs draw.
LOW = -10.0
#: Choices that such a number is added to are all the same.
DROWNED = -9.9e8


@dataclass(frozen=True)
class Groups:
    """Groups that stay. ``fill`` is what the choices of the others become, ``least`` the number that the graph writes
    for it: choices that are no larger would not be what the op takes them for. ``added``: it is added to them."""

    count: int
    kept: int
    top: int
    fill: str
    mask: ir.Node
    least: float = 0.0
    added: bool = False


def read_masked(r: Reader, value: ir.Value) -> tuple[ir.Value, Groups] | None:
    """(choice before the mask, groups) of masked choices."""
    base = r.moved(value)
    node = r.node(base, "Where", "Mul", "Add")
    if node is None:
        return None
    if node.op_type == "Add":
        for added, inner in (node.inputs, node.inputs[::-1]):
            taken = r.attempt(_added, added)
            if taken is not None and inner is not None:
                return _groups(r, inner, taken[0], "-inf", taken[1], added=True)
        return None
    if node.op_type == "Mul":
        for mask, inner in (node.inputs, node.inputs[::-1]):
            found = r.attempt(_mask, mask)
            if found is not None and inner is not None and found[1]:
                return _groups(r, inner, found[0], "0")
        return None
    condition, yes, no = node.inputs
    found = r.attempt(_mask, condition)
    if found is None:
        return None
    inner, fill = (yes, no) if found[1] else (no, yes)
    number = r.filled(fill)
    if number is None or inner is None:
        return None
    if number == 0.0:
        return _groups(r, inner, found[0], "0")
    if number <= LOW:
        return _groups(r, inner, found[0], "-inf", number)
    r.refuse(f"choices of groups that do not stay become {number:g}: the op knows 0, and numbers below all choices")
    return None


def _added(r: Reader, value: ir.Value | None) -> tuple[ir.Node, float] | None:
    """(the `TopK` of groups, the number) of what is 0 for groups that stay, and for the others a number so low that
    float32 holds no digit of a choice beside it: ``(mask - 1) * 1e9``, or a choice between the two."""
    node = r.node(r.moved(value), "Where", "Mul")
    if node is None:
        return None
    if node.op_type == "Where":
        found = r.attempt(_mask, node.inputs[0])
        if found is None:
            return None
        stays, others = node.inputs[1:] if found[1] else node.inputs[:0:-1]
        number = r.filled(others) if r.is_filled(stays, 0.0) else None
        return (found[0], number) if number is not None and number <= DROWNED else None
    for factor, difference in (node.inputs, node.inputs[::-1]):
        scale, step = r.scalar(factor), r.node(r.moved(difference), "Sub", "Add")
        if scale is None or step is None:
            continue
        for mask, one in (step.inputs, step.inputs[::-1]):
            # mask - 1, mask + -1 or 1 - mask: 0 for groups that stay
            wanted, rest = (-1.0, -1.0) if step.op_type == "Add" else (1.0, -1.0 if mask is step.inputs[0] else 1.0)
            found = r.attempt(_mask, mask) if r.scalar(one) == wanted else None
            if found is not None and found[1] and scale * rest <= DROWNED:
                return found[0], scale * rest
    return None


def _mask(r: Reader, value: ir.Value | None) -> tuple[ir.Node, bool] | None:
    """(the `TopK` of groups, does true or 1 mean that a group stays) of a mask."""
    base = r.moved(value)
    if base is None:
        return None
    node = r.node(base, "Not", "Cast", "Equal", "Greater", "Less", "Sub", "Gather", *_SETS)
    if node is None:
        return None
    if node.op_type in ("Not", "Cast"):
        inner = _mask(r, node.inputs[0])
        return None if inner is None else (inner[0], inner[1] != (node.op_type == "Not"))
    if node.op_type in ("Equal", "Greater"):
        number = r.filled(node.inputs[1])
        found = r.attempt(_mask, node.inputs[0]) if number is not None else None
        if found is not None and (node.op_type, number) in (("Equal", 0.0), ("Equal", 1.0), ("Greater", 0.0)):
            return found[0], found[1] != ((node.op_type, number) == ("Equal", 0.0))
    if node.op_type == "Sub" and r.is_filled(node.inputs[0], 1.0):
        found = _mask(r, node.inputs[1])
        return None if found is None else (found[0], not found[1])
    if node.op_type == "Gather":
        # repeat_interleave by a constant index
        return _mask(r, node.inputs[0]) if r.view.array(node.inputs[1]) is not None else None
    found_set = r.attempt(_set_of, base)
    if found_set is None:
        return None
    index, stays = found_set
    topk = r.node(r.moved(index), "TopK")
    if topk is None or r.moved(index) is not topk.outputs[1]:
        return None
    return topk, stays


#: Ops that make a set, as zeros and ones, of indices.
_SETS = ("ScatterElements", "ReduceSum", "ReduceMax", "OneHot", "Or")


def _set_of(r: Reader, value: ir.Value) -> tuple[ir.Value, bool] | None:
    """(indices, is 1 in the set) of a tensor that is 1 at some indices of its last axis and 0 elsewhere, or the other
    way round."""
    node = r.node(value, *_SETS)
    if node is None:
        return None
    if node.op_type == "ScatterElements":
        data, index, updates = node.inputs
        if attribute_string(node, "reduction", "none") != "none" or not _last_axis(node, data) or index is None:
            return None
        before, after = r.filled(data), r.filled(updates)
        if (before, after) not in ((0.0, 1.0), (1.0, 0.0)):
            return None
        return index, after == 1.0
    if node.op_type in ("ReduceSum", "ReduceMax"):
        one_hot = r.attempt(read_one_hot, node.inputs[0])
        if one_hot is None or not r.reduces(node, -2):
            return None
        return one_hot[0], True
    return None


def read_one_hot(r: Reader, value: ir.Value | None) -> tuple[ir.Value, int] | None:
    """(indices, how many there may be) of a one-hot tensor with the classes on its last axis."""
    base = value
    while (cast := r.node(base, "Cast", "Identity")) is not None:
        base = cast.inputs[0]
    node = r.node(base, "Equal", "OneHot")
    if node is None:
        return None
    if node.op_type == "OneHot":
        depth, values = r.scalar(node.inputs[1]), r.view.array(node.inputs[2])
        if depth is None or values is None or list(values) != [0, 1] or attribute_int(node, "axis", -1) != -1:
            return None
        return (node.inputs[0], int(depth)) if node.inputs[0] is not None else None
    for index, classes in (node.inputs, node.inputs[::-1]):
        numbers = r.view.array(classes)
        if numbers is None or index is None or numbers.ndim == 0 or numbers.shape[-1] != numbers.size:
            continue
        if list(numbers.reshape(-1)) != list(range(numbers.size)) or last_dim(index) != 1:
            continue
        return index, int(numbers.size)
    return None


def _last_axis(node: ir.Node, data: ir.Value | None) -> bool:
    rank = len(data.shape) if data is not None and data.shape is not None else None
    axis = attribute_int(node, "axis", 0)
    return axis == -1 or axis == (rank - 1 if rank is not None else 1)


def _groups(
    r: Reader, choice: ir.Value, topk: ir.Node, fill: str, least: float = 0.0, *, added: bool = False
) -> tuple[ir.Value, Groups] | None:
    """Groups by the best choices of each: the masked choice must be what the group scores are made of."""
    kept, score = r.scalar(topk.inputs[1]), topk.inputs[0]
    count = last_dim(score)
    if kept is None or count is None or attribute_int(topk, "largest", 1) != 1:
        return None
    if attribute_int(topk, "axis", -1) % len(score.shape) != len(score.shape) - 1:  # type: ignore[union-attr, arg-type]
        return None
    found = r.attempt(_group_score, score)
    if found is None:
        r.refuse("group scores that are neither the sum of a group's best choices nor their maximum")
        return None
    source, top, _ = found
    if r.moved(source) is not r.moved(choice):
        r.refuse("groups are scored by other numbers than those that are chosen from")
        return None
    return choice, Groups(count, int(kept), top, fill, topk, least, added)


def _group_score(r: Reader, value: ir.Value) -> tuple[ir.Value, int, int] | None:
    """(choice by group, how many count, experts a group) of group scores."""
    base = r.moved(value)
    node = r.node(base, "ReduceSum", "ReduceMax", "TopK")
    if node is None:
        return None
    source = node.inputs[0]
    if node.op_type != "TopK" and not r.reduces(node, -1):
        return None
    size = last_dim(source)
    if node.op_type == "ReduceMax":
        return None if source is None or size is None else (source, 1, size)
    best = node if node.op_type == "TopK" else r.node(r.moved(source), "TopK")
    if best is None or attribute_int(best, "largest", 1) != 1 or best.inputs[0] is None:
        return None
    top, each = r.scalar(best.inputs[1]), last_dim(best.inputs[0])
    if top is None or each is None or attribute_int(best, "axis", -1) not in (-1, len(best.inputs[0].shape or ()) - 1):
        return None
    reached = r.moved(source) if node is not best else base
    if reached is not best.outputs[0] or (node is best and top != 1.0):
        return None
    return best.inputs[0], int(top), each
