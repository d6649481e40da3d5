"""Where mixtures of experts may be: routers, and the values that all of a router's influence passes through."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import onnx_ir as ir

from ..fuse import Place
from ..graph import FLOAT_TYPES, GraphView, is_op, rank_of
from ..region import Region
from .reader import MOVES, Reader
from .router import Router, read_router

#: Values tried as the routed experts' result.
MAX_CUTS = 24


@dataclass
class Site(Place):
    """A router, what was read of it, and the graph's nodes in order."""

    router: Router | None = None
    reader: Reader | None = None
    order: list[ir.Node] = field(default_factory=list)
    ids: ir.Value | None = None  # what experts are chosen by where there is no router
    why: str = ""  # why what looks like a router is none


def find_sites(view: GraphView) -> list[Site]:
    """All routers, in graph order."""
    found = []
    order = list(view.graph)
    for node in order:
        if not is_op(node, "TopK") or node.outputs[1].uses() == () or view.is_const(node.outputs[0]):
            continue
        reader = Reader(view)
        router = read_router(reader, node)
        name = scope_of(node) or node.name or f"node {view.position[node]}"
        if router is not None:
            region = Region([], sorted(reader.marks.all(), key=view.position.__getitem__), [])
            found.append(Site(name, "", region, [node], router, reader, order))
        elif reader.why:
            found.append(
                Site(name, "", Region([], [node], []), [node], None, reader, order, node.outputs[1], reader.why[-1])
            )
    known = {s.ids if s.router is None else s.router.ids for s in found}
    return found + _without_router(view, order, {v for v in known if v is not None})


def _without_router(view: GraphView, order: list[ir.Node], known: set[ir.Value]) -> list[Site]:
    """Experts' weights that are gathered by indices no router made, and loops over experts by such; one site for each
    index."""
    found: dict[ir.Value, Site] = {}
    for node in order:
        index, form = _gathering(view, node), "gathered"
        if index is None:
            index, form = _looked_for(view, node), "loop"
        source = None if index is None else Reader(view).moved(index)
        if source is None or source in found or _made_of(view, source, known):
            continue
        name = scope_of(node) or node.name or f"node {view.position[node]}"
        found[source] = Site(name, form, Region([], [node], []), [node], None, Reader(view), order, source)
    return list(found.values())


def _gathering(view: GraphView, node: ir.Node) -> ir.Value | None:
    """The index by which a node gathers constant matrices that something is multiplied by."""
    if not is_op(node, "Gather", "GatherND") or rank_of(node.inputs[0]) != 3:  # type: ignore[arg-type]
        return None
    data, index = node.inputs[0], node.inputs[1]
    if data is None or index is None or not view.is_const(data) or view.is_const(index):
        return None
    return index if _is_multiplied(view, node.outputs[0]) else None


def _looked_for(view: GraphView, node: ir.Node) -> ir.Value | None:
    """The indices among which a `NonZero` looks for an expert's number, to give its tokens to a product."""
    value = node.inputs[0] if is_op(node, "NonZero") else None
    while value is not None:
        producer = value.producer()
        if is_op(producer, "Equal") and producer is not None:
            index = next((v for v in producer.inputs if v is not None and not view.is_const(v)), None)
            number = any(v is not None and view.is_const(v) for v in producer.inputs)
            experts = number and index is not None and view.is_integer(index)
            return index if experts and _reaches_product(view, node.outputs[0]) else None
        if (
            not is_op(producer, "Cast", "Gather", "ReduceMax", "ReduceSum", "Slice", "Split", *MOVES)
            or producer is None
        ):
            return None
        value = producer.inputs[0]
    return None


def _reaches_product(view: GraphView, value: ir.Value, depth: int = 12) -> bool:
    """Do places lead to rows that are multiplied by constant weights?"""
    for user in view.users(value):
        if is_op(user, "MatMul", "Gemm"):
            return any(v is not None and view.is_const(v) for v in user.inputs[:2])
        if depth and is_op(user, "Concat", "Gather", "GatherND", "Slice", "Split", *MOVES):
            if any(_reaches_product(view, v, depth - 1) for v in user.outputs):
                return True
    return False


def _made_of(view: GraphView, value: ir.Value, known: set[ir.Value], depth: int = 6) -> bool:
    """Is an index a router's ids, or made of them in a few steps?"""
    if value in known:
        return True
    producer = value.producer()
    if producer is None or depth == 0:
        return False
    return any(_made_of(view, v, known, depth - 1) for v in producer.inputs if v is not None and view.is_integer(v))


def _is_multiplied(view: GraphView, value: ir.Value) -> bool:
    users = view.users(value)
    moving = [u for u in users if is_op(u, "Reshape", "Transpose", "Squeeze", "Unsqueeze", "Cast", "DequantizeLinear")]
    return any(is_op(u, "MatMul", "Einsum") for u in users) or any(_is_multiplied(view, u.outputs[0]) for u in moving)


def scope_of(node: ir.Node) -> str:
    """The module that a node was exported from: the block around the router."""
    scopes = node.metadata_props.get("pkg.torch.onnx.name_scopes", "")
    names = [s for s in scopes.strip("[]").replace("'", "").replace('"', "").split(", ") if s]
    module = names[-2] if len(names) > 1 else ""
    return module.rpartition(".")[0] or module


def cuts(view: GraphView, order: list[ir.Node], start: ir.Node) -> Iterator[ir.Value]:
    """Float values that all influence of a node's results passes through, in graph order.

    Results that leave the graph on the way do not count: they stay in it.
    """
    waiting: dict[ir.Value, set[ir.Node]] = {v: users for v in start.outputs if (users := set(view.users(v)))}
    passed = 0
    for place in range(view.position[start] + 1, len(order)):
        node = order[place]
        read = [v for v in dict.fromkeys(view.inputs_of(node)) if v in waiting]
        if not read:
            continue
        for value in read:
            waiting[value].discard(node)
            if not waiting[value]:
                del waiting[value]
        for value in node.outputs:
            users = set(view.users(value))
            if users or value.is_graph_output():
                waiting[value] = users
        if len(waiting) == 1:
            only = next(iter(waiting))
            if (only.dtype is None or only.dtype in FLOAT_TYPES) and rank_of(only) in (2, 3):
                yield only
                passed += 1
                if passed >= MAX_CUTS:
                    return
            if not waiting[only]:
                return
