"""Caches on the way: new tokens joined to one that grows, or written into one of a fixed size."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from ..graph import GraphView, attribute_int, attribute_string, is_op, rank_of, static_dims


@dataclass(frozen=True)
class Join:
    """New tokens are joined to a cache: ``present = [past, new]`` along ``axis``, or written into it at ``index``.

    ``way``: how an index tells places: "places", one for each token; "whole", one for each axis up to the tokens';
    "truths" or "falses", for each place whether it is written to, or is not. ``along``: the index's axis of tokens, or
    of places, counted from the last.
    """

    node: ir.Node
    past: ir.Value
    new: ir.Value
    present: ir.Value
    axis: int
    index: ir.Value | None = None
    along: int = 2
    way: str = "places"


def join_of(view: GraphView, node: ir.Node) -> Join | None:
    """A Concat along another axis than the last: a cache and what is new."""
    rank = rank_of(node.outputs[0])
    if rank is None or len(node.inputs) != 2:
        return None
    axis = attribute_int(node, "axis", 0) % rank
    past, new = node.inputs
    if axis in (0, rank - 1) or past is None or new is None or view.is_const(past):
        return None
    return Join(node, past, new, node.outputs[0], axis)


def write_of(view: GraphView, node: ir.Node) -> Join | None:
    """New tokens written into a cache that comes from outside, at places along one axis.

    ScatterND writes along the first axis, so the exporter turns the tokens' axis there and back; the older one has
    places along all axes up to it. ScatterElements writes along any, with a place for each element; Where, with a truth
    for each.
    """
    if is_op(node, "Where"):
        return _chosen(view, node)
    if not is_op(node, "ScatterND", "ScatterElements") or attribute_string(node, "reduction", "none") != "none":
        return None
    data, index, new = node.inputs[:3]
    if data is None or index is None or new is None:
        return None
    if is_op(node, "ScatterElements"):
        return _elements(view, node, data, index, new)
    there = data.producer()
    if there is None:
        return _whole(view, node, data, index, new)
    return _turned(view, node, there, index, new) if is_op(there, "Transpose") else None


def _turned(view: GraphView, node: ir.Node, there: ir.Node, index: ir.Value, new: ir.Value) -> Join | None:
    past, order = there.inputs[0], list(there.attributes["perm"].as_ints())
    turned = [u for u in view.users(node.outputs[0]) if is_op(u, "Transpose")]
    back = next((u for u in turned if _undoes(u, order)), None)
    if back is None or past is None or past.producer() is not None or view.is_const(past):
        return None
    dims = static_dims(index)
    if dims is None or len(dims) != 2 or dims[1] != 1:
        return None
    fresh = new.producer()  # turned as the cache is, or made in that order
    if fresh is not None and is_op(fresh, "Transpose") and fresh.inputs[0] is not None:
        if list(fresh.attributes["perm"].as_ints()) == order:
            new = fresh.inputs[0]
    return Join(node, past, new, back.outputs[0], order[0], index)


def _whole(view: GraphView, node: ir.Node, past: ir.Value, index: ir.Value, new: ir.Value) -> Join | None:
    dims, rank = static_dims(index), rank_of(past)
    if dims is None or rank is None or rank < 3 or len(dims) != rank or dims[-1] != rank - 1 or view.is_const(past):
        return None
    if not _covers(new, past, rank - 2):
        return None
    return Join(node, past, new, node.outputs[0], rank - 2, index, way="whole")


def _elements(view: GraphView, node: ir.Node, past: ir.Value, index: ir.Value, new: ir.Value) -> Join | None:
    rank = rank_of(past)
    if rank is None or past.producer() is not None or view.is_const(past):
        return None
    axis = attribute_int(node, "axis", 0) % rank
    if axis in (0, rank - 1) or not _covers(new, past, axis):
        return None
    return Join(node, past, new, node.outputs[0], axis, index, rank - axis)


def _chosen(view: GraphView, node: ir.Node) -> Join | None:
    """One token, where a truth says so: `Where(arange(size) == place, new, past)`."""
    index, *sides = node.inputs
    if index is None or view.is_const(index):
        return None
    for way, past, new in (("truths", sides[1], sides[0]), ("falses", sides[0], sides[1])):
        if past is None or new is None or past.producer() is not None or view.is_const(past):
            continue
        dims, rank, truths = static_dims(new), rank_of(past), static_dims(index)
        if dims is None or rank is None or truths is None or len(truths) < 2 or rank < 3 or len(dims) != rank:
            continue
        if dims[-2] == 1 and truths[-1] == 1 and all(d == 1 for d in truths[:-2]) and _covers(new, past, rank - 2):
            return Join(node, past, new, node.outputs[0], rank - 2, index, way=way)
    return None


def _covers(value: ir.Value, past: ir.Value, axis: int) -> bool:
    """Has it a cache's size on all axes but one? What has less is written to a part of the cache, or spread over it."""
    if value.shape is None or past.shape is None or len(value.shape) != len(past.shape):
        return False
    return all(i == axis or a == b for i, (a, b) in enumerate(zip(value.shape, past.shape, strict=True)))


def _undoes(node: ir.Node, order: list[int]) -> bool:
    """Does a transpose bring axes back that were brought into this order?"""
    back = list(node.attributes["perm"].as_ints())
    return len(back) == len(order) and [back[p] for p in order] == list(range(len(order)))
