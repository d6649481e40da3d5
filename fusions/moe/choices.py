"""Gathered weights in other layouts: one choice after the other, or rows of choices that are added up by token."""

from __future__ import annotations

import onnx_ir as ir

from ..graph import attribute_int, attribute_string, static_dims
from .forms import Routed, inputs_of, is_gathered, linears
from .linear import Linear
from .mlp import Mlp, read_mlp
from .reader import Reader, last_dim
from .router import Router
from .stored import slice_of
from .weights import Weighting, read_weighting


def read_by_choice(r: Reader, router: Router, value: ir.Value) -> Routed | None:
    """A sum over the places of the choices: each takes one column of the ids and of the weights."""
    terms = [t for t in r.terms(value) if not r.is_filled(t, 0.0)]
    if not router.top_k <= len(terms) <= router.top_k + 1:
        return None
    found: dict[int, tuple[Mlp, Weighting]] = {}
    beside: list[ir.Value] = []
    for term in terms:
        read = r.attempt(_one_choice, router, term)
        if read is None:
            beside.append(term)
        elif read[0] in found:
            return None
        else:
            found[read[0]] = read[1:]
    if sorted(found) != list(range(router.top_k)) or len(beside) > 1:
        return None
    mlps = [mlp for mlp, _ in found.values()]
    first = mlps[0]
    alike = all(m.settings() == first.settings() and _weights(m) == _weights(first) for m in mlps)
    if not alike:
        r.refuse("the places of the choices take their experts from different weights")
    if not alike or len({w for _, w in found.values()}) != 1:
        return None
    inputs = tuple(x for m in mlps for x in inputs_of(m))
    return Routed("choice by choice", (first,), found[0][1], inputs, tuple(beside))


def _weights(mlp: Mlp) -> list[object]:
    """What the projections of an expert are read of."""

    def key(layer: Linear) -> object:
        bias = None if layer.bias is None else (layer.bias.seen, layer.bias.expert, layer.bias.out)
        return layer.seen, layer.expert, layer.out, layer.into, bias

    rows = (mlp.gate.rows, None if mlp.up is None else mlp.up.rows)
    return [*(key(layer) for layer in linears(mlp)), rows]


def _one_choice(r: Reader, router: Router, value: ir.Value) -> tuple[int, Mlp, Weighting] | None:
    """(place, expert, weights) of the weight of a place times what its expert gives."""
    node = r.node(value, "Mul")
    if node is None:
        return None
    for weight, output in (node.inputs, node.inputs[::-1]):
        column = r.attempt(_column, router, weight)
        weighting = None if column is None else r.attempt(read_weighting, router, column[0])
        mlp = None if weighting is None else r.attempt(read_mlp, output)
        if column is None or weighting is None or mlp is None or mlp.factors:
            continue
        ids = [i for layer in linears(mlp) for i in (layer.ids, *([layer.bias.ids] if layer.bias else []))]
        taken = [None if i is None else r.attempt(_column, router, i) for i in ids]
        if all(t is not None and t[1] == column[1] and r.moved(t[0]) is router.ids for t in taken):
            return column[1], mlp, weighting
    return None


def _column(r: Reader, router: Router, value: ir.Value | None) -> tuple[ir.Value, int] | None:
    """(what has a column for each place of the choices, which one of them a value is)."""
    base = r.moved(value)
    node = r.node(base, "Slice", "Gather", "Split")
    if node is None and base is not None and router.top_k == 1:
        return base, 0  # the only choice: nothing has to be taken
    source = None if node is None else node.inputs[0]
    dims = None if source is None else static_dims(source)
    if node is None or source is None or dims is None or dims[-1] != router.top_k or base is None:
        return None
    axis = attribute_int(node, "axis", 0) % len(dims)
    if node.op_type == "Slice":
        found = slice_of(r.view, node, tuple(1 if d is None else d for d in dims))
        return (source, found[1][0]) if found is not None and found[0] == len(dims) - 1 and len(found[1]) == 1 else None
    if axis != len(dims) - 1:
        return None
    if node.op_type == "Split":
        return (source, list(node.outputs).index(base)) if len(node.outputs) == router.top_k else None
    index = r.view.array(node.inputs[1])
    return (source, int(index.reshape(-1)[0]) % router.top_k) if index is not None and index.size == 1 else None


def read_added_rows(r: Reader, router: Router, value: ir.Value) -> Routed | None:
    """A row for each choice, in order, added to its token's: ``out.index_add_(0, token_of_choice, rows)``."""
    node = r.node(r.moved(value), "ScatterND")
    if node is None or attribute_string(node, "reduction", "none") != "add" or not r.is_filled(node.inputs[0], 0.0):
        return None
    token = r.attempt(_token_of_choice, router, node.inputs[1])
    product = None if token is None else r.node(r.moved(node.inputs[2]), "Mul")
    if product is None or token is None:
        return None
    for weights, output in (product.inputs, product.inputs[::-1]):
        mlp = r.attempt(read_mlp, output)
        if mlp is None or mlp.factors or not is_gathered(r, router, mlp):
            continue
        rows = [r.attempt(_rows_of, x, token) for x in inputs_of(mlp)]
        weighting = read_weighting(r, router, weights)
        if weighting is not None and all(x is not None for x in rows):
            return Routed("gathered", (mlp,), weighting, tuple(x for x in rows if x is not None))
    return None


def _token_of_choice(r: Reader, router: Router, value: ir.Value | None) -> ir.Value | None:
    """The `Range` over the tokens whose numbers are repeated for each of their choices."""
    base = r.moved(value)
    node = r.node(base, "Range")
    if node is None or r.scalar(node.inputs[0]) != 0 or r.scalar(node.inputs[2]) != 1:
        return None
    # it is spread over a last axis of as many entries as there are choices
    trail = [] if value is None else r.trail(value)
    spread = any(last_dim(v) == router.top_k and len(v.shape or ()) >= 2 for v in trail)
    return node.outputs[0] if spread else None


def _rows_of(r: Reader, value: ir.Value | None, token: ir.Value) -> ir.Value | None:
    """What rows are taken of, one for each choice; the value itself where they are not taken by the same index."""
    base = r.moved(value)
    node = r.node(base, "Gather", "GatherND")
    if node is None:
        return value
    whole = attribute_int(node, "batch_dims", 0) == 0 and attribute_int(node, "axis", 0) == 0
    return node.inputs[0] if whole and r.moved(node.inputs[1]) is token else None
