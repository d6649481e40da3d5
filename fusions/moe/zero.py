"""Experts without weights, which give back what they are given (LongCat): the last ones of a router's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import onnx_ir as ir

from .dense_weights import columns_of, read_column, read_dense
from .forms import Parts, Routed, choices_sum, inputs_of, is_gathered, read_gathered, read_stacked
from .linear import Linear
from .mlp import Mlp, read_mlp
from .reader import Reader, last_dim
from .router import Router
from .weights import Weighting, read_split, read_weighting

#: (experts, weights, what they are given)
Given = tuple[tuple[int, ...], Weighting, ir.Value]


def read_weighted_token(r: Reader, router: Router, value: ir.Value, parts: Parts) -> Given | None:
    """The token itself times the weights of some experts: what the experts in ``parts`` read, too."""
    return next((found for found in _products(r, router, value) if parts.reads(r, found[2])), None)


def _products(r: Reader, router: Router, value: ir.Value | None) -> Iterator[Given]:
    """All readings of a value as something times some experts' weights; marks the nodes of the last one."""
    node = r.node(value, "Mul")
    if node is None:
        return
    level = r.marks.level()
    for token, weight in (node.inputs, node.inputs[::-1]):
        if token is None:
            continue
        r.marks.back(level)
        column = r.attempt(read_column, router, weight)
        if column is not None:
            yield (column[0],), column[1], token
            continue
        columns = r.attempt(read_columns, router, weight)
        if columns is not None:
            yield columns[0], columns[1], token


def read_columns(r: Reader, router: Router, value: ir.Value | None) -> tuple[tuple[int, ...], Weighting] | None:
    """(experts, weights) of the sum of the last experts' weights, for every token: columns of dense weights, or choices
    by their numbers."""
    node = r.node(r.moved(value), "ReduceSum")
    if node is None or not r.reduces(node, -1):
        return None
    source = node.inputs[0]
    base = r.moved(source)
    inner = r.node(base, "Slice", "Split", "Mul", "Where")
    if inner is None:
        return None
    if inner.op_type in ("Slice", "Split"):
        numbers = columns_of(r, router, inner, base)
        found = read_dense(r, router, inner.inputs[0]) if numbers else None
        return None if not numbers or found is None else (tuple(numbers), found)
    if last_dim(source) != router.top_k:
        return None
    pairs = [(inner.inputs[0], inner.inputs[1], True), (inner.inputs[1], inner.inputs[0], True)]
    if inner.op_type == "Where":
        condition, yes, no = inner.inputs
        pairs = [(condition, yes, True), (condition, no, False)]
        pairs = [p for p, other in zip(pairs, (no, yes), strict=True) if r.is_filled(other, 0.0)]
    for mask, weights, above in pairs:
        split = r.attempt(read_split, router, mask)
        if split is not None and split[1] == above:
            found = read_weighting(r, router, weights)
            return None if found is None else (tuple(range(split[0], router.experts)), found)
    return None


def read_beside_tokens(r: Reader, router: Router, value: ir.Value) -> Routed | None:
    """The weighted sum of gathered or stacked experts with weights, plus the token times the other experts' weights."""
    node = r.node(r.moved(value), "Add")
    if node is None:
        return None
    for given, rest in (node.inputs, node.inputs[::-1]):
        for numbers, weighting, token in _products(r, router, r.moved(given)):
            level = r.marks.level()
            first = numbers[0]
            if rest is None or numbers != tuple(range(first, router.experts)) or first == 0:
                continue
            own = replace(router, bound=first)
            routed = r.attempt(read_gathered, own, rest) or r.attempt(read_stacked, own, rest)
            if routed is not None and routed.weighting == replace(weighting, own_only=True):
                inputs, experts = (*routed.inputs, token), tuple(_first(m, first) for m in routed.experts)
                return Routed(routed.form, experts, weighting, inputs, zero=router.experts - first)
            r.marks.back(level)
    return None


def read_gathered_or_token(r: Reader, router: Router, value: ir.Value) -> Routed | None:
    """For each choice what its expert gives, or the token where it has no weights; weighted and summed."""
    found = choices_sum(r, router, value)
    if found is None:
        return None
    for weights, outputs in (found, found[::-1]):
        node = r.node(r.moved(outputs), "Where")
        split = None if node is None else r.attempt(read_split, router, node.inputs[0])
        if node is None or split is None:
            continue
        token, output = node.inputs[1:] if split[1] else node.inputs[:0:-1]
        own = replace(router, bound=split[0])
        mlp = r.attempt(read_mlp, output)
        if mlp is None or token is None or mlp.factors or not is_gathered(r, own, mlp):
            continue
        weighting = read_weighting(r, router, weights)
        if weighting is not None and 0 < split[0] < router.experts:
            inputs = (*inputs_of(mlp), token)
            experts = (_first(mlp, split[0]),)
            return Routed("gathered", experts, weighting, inputs, zero=router.experts - split[0])
    return None


def _first(mlp: Mlp, count: int) -> Mlp:
    """An expert whose weights are a stack, of which the first ones are taken: LongCat's has rows for all numbers."""

    def taken(layer: Linear) -> Linear:
        if layer.expert is None or layer.seen.shape[layer.expert] <= count:
            return layer
        bias, few = layer.bias, list(range(count))
        if bias is not None and bias.expert is not None:
            bias = replace(bias, seen=bias.seen.at(bias.expert, few))
        return replace(layer, seen=layer.seen.at(layer.expert, few), bias=bias)

    up = None if mlp.up is None else replace(mlp.up, linear=taken(mlp.up.linear))
    return replace(mlp, down=taken(mlp.down), gate=replace(mlp.gate, linear=taken(mlp.gate.linear)), up=up)
