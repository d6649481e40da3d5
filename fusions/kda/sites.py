"""Where a KDA block may be: from an exponential, a Scan, a Loop or a LinearAttention node to the value it ends in."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import onnx_ir as ir

from ..fuse import Place
from ..graph import FLOAT_TYPES, GraphView, is_op, rank_of
from ..names import name_of
from ..region import Region, RegionTooLarge, backward, forward_to_borders, mark_dependents

#: Ops that a KDA block never holds: a region with one of them is another block (attention, routing).
_FOREIGN = frozenset({"Softmax", "TopK", "Attention", "NonZero", "LSTM", "GRU", "RNN", "Conv"})


@dataclass
class Site(Place):
    """A block that ends in ``x``, the anchors that it depends on, and other graph outputs that they reach."""

    x: ir.Value = field(kw_only=True)
    others: list[ir.Value] = field(default_factory=list, kw_only=True)


def is_anchor(view: GraphView, node: ir.Node) -> bool:
    """A node that can be a recurrence's decay, or a recurrence as a whole."""
    if node.op_type == "LinearAttention" or is_op(node, "Scan", "Loop"):
        return True
    return is_op(node, "Exp") and not view.is_const(node.outputs[0])


def find_sites(view: GraphView) -> Iterator[Site]:
    """All places to try, in graph order; each anchor is part of one site at most."""
    done: set[ir.Node] = set()
    for node in view.graph:
        if node in done or not is_anchor(view, node):
            continue
        done.add(node)
        for site in _sites_of(view, node):
            done.update(site.anchors)
            done.update(_state_anchors(view, site))
            yield site


def _state_anchors(view: GraphView, site: Site) -> list[ir.Node]:
    """Anchors that only the block's final state depends on."""
    own = set(site.anchors)
    found: list[ir.Node] = []
    for value in site.others:
        try:
            anchors = [n for n in backward(view, [value]).nodes if is_anchor(view, n)]
        except RegionTooLarge:
            continue
        if own.intersection(anchors):
            found += anchors
    return found


def _is_end(view: GraphView, node: ir.Node) -> bool:
    return view.is_linear(node) or view.is_depthwise(node) or view.is_opaque(node)


def _sites_of(view: GraphView, anchor: ir.Node) -> list[Site]:
    try:
        ends, results = forward_to_borders(view, anchor, lambda n: _is_end(view, n))
    except RegionTooLarge:
        return []
    found: list[Site] = []
    outputs = ends or [v for v in results if v.dtype is None or v.dtype in FLOAT_TYPES]
    if not ends:
        # a block without a projection behind it: its output is the graph output that has tokens, states have none
        outputs = sorted(outputs, key=lambda v: _looks_like_state(v))[:1]
    for x in outputs:
        try:
            region = backward(view, [x])
        except RegionTooLarge:
            continue
        if any(is_op(n, *_FOREIGN) for n in region.nodes):
            continue
        anchors = [n for n in region.nodes if is_anchor(view, n)]
        if not anchors:
            continue
        mark_dependents(view, region, anchors)
        others = [v for v in results if v is not x]
        form, name = form_of(view, region, anchors), name_of(anchors[0], view)
        found.append(Site(name, form, region, anchors, x=x, others=others))
    return found


def _looks_like_state(value: ir.Value) -> bool:
    """Rank 4 with static last dims and no symbolic one but the first."""
    if value.shape is None or rank_of(value) != 4:
        return False
    name = (value.name or "").lower()
    if "state" in name or "present" in name:
        return True
    return all(isinstance(d, int) for d in list(value.shape)[1:]) and value.shape[1] != 1


def form_of(view: GraphView, region: Region, anchors: list[ir.Node]) -> str:
    """How the exporter wrote the recurrence, for the report."""
    kinds = {a.op_type for a in anchors}
    for kind, name in (("LinearAttention", "linear-attention"), ("Scan", "scan"), ("Loop", "loop")):
        if kind in kinds:
            return name
    if any(is_op(n, "CumSum") for n in region.nodes):
        return "chunked"
    decays = sum(1 for a in anchors if is_op(a, "Exp"))
    return "recurrent" if decays <= 2 and len(region.nodes) < 120 else "unrolled"
