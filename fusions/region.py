"""Regions: the part of a graph between a block's output and its borders, found by walking the data flow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import onnx_ir as ir

from .graph import GraphView

#: A block of more nodes than this is no block: the walk has left it.
NODE_LIMIT = 40_000


class RegionTooLarge(Exception):
    """The walk back from a value left the block."""


@dataclass
class Region:
    """The nodes that compute ``outputs`` from ``borders``, in graph order.

    ``borders`` are data values (linear layers' results, convolutions' results, graph inputs); constants and integer
    values (shapes) are not among them. ``depends`` holds the values that an anchor reaches.
    """

    outputs: list[ir.Value]
    nodes: list[ir.Node]
    borders: list[ir.Value]
    depends: set[ir.Value] = field(default_factory=set)

    def __contains__(self, node: ir.Node) -> bool:
        return node in self._set

    def __post_init__(self) -> None:
        self._set = set(self.nodes)


def backward(view: GraphView, outputs: list[ir.Value], stop: Callable[[ir.Value], bool] | None = None) -> Region:
    """Walk back from ``outputs`` to the borders (``view.is_border`` unless ``stop`` says otherwise).

    Raises:
        RegionTooLarge: after :data:`NODE_LIMIT` nodes.
    """
    stop = stop or view.is_border
    nodes: set[ir.Node] = set()
    borders: dict[ir.Value, None] = {}
    stack = list(outputs)
    seen: set[ir.Value] = set(outputs)
    first = True
    while stack:
        value = stack.pop()
        producer = value.producer()
        if producer is None or (stop(value) and not (first and value in outputs)):
            if not view.is_const(value) and not view.is_integer(value):
                borders[value] = None
            continue
        if producer in nodes:
            continue
        nodes.add(producer)
        if len(nodes) > NODE_LIMIT:
            raise RegionTooLarge
        for operand in view.inputs_of(producer):
            if operand not in seen:
                seen.add(operand)
                stack.append(operand)
    ordered = sorted(nodes, key=view.position.__getitem__)
    places = {v: view.position.get(p, -1) if (p := v.producer()) is not None else -1 for v in borders}
    return Region(outputs, ordered, sorted(borders, key=places.__getitem__))


def mark_dependents(view: GraphView, region: Region, anchors: list[ir.Node]) -> None:
    """Fill ``region.depends``: the values inside the region that an anchor's result reaches."""
    anchor_set = set(anchors)
    for node in region.nodes:
        if node in anchor_set or any(v in region.depends for v in view.inputs_of(node)):
            region.depends.update(node.outputs)


def cuts(view: GraphView, region: Region, output: ir.Value) -> list[ir.Value]:
    """Values that all of the anchors' influence on ``output`` passes through, from ``output`` backwards.

    A frontier of dependent values is moved back over the latest node again and again; whenever one value is left, it
    is a cut.
    """
    found: list[ir.Value] = []
    frontier: set[ir.Value] = {output}
    while frontier:
        if len(frontier) == 1:
            found.append(next(iter(frontier)))
        latest = max(frontier, key=lambda v: view.position[v.producer()])  # type: ignore[index]
        node = latest.producer()
        assert node is not None
        frontier -= set(node.outputs)
        frontier |= {v for v in view.inputs_of(node) if v in region.depends}
        if len(found) > 64:
            break
    return found


def forward_to_borders(
    view: GraphView, start: ir.Node, is_end: Callable[[ir.Node], bool]
) -> tuple[list[ir.Value], list[ir.Value]]:
    """Where an anchor's influence goes: values that enter an ``is_end`` node, and graph outputs it reaches."""
    ends: dict[ir.Value, None] = {}
    results: dict[ir.Value, None] = {}
    seen: set[ir.Node] = {start}
    stack = [start]
    while stack:
        node = stack.pop()
        for value in node.outputs:
            if value.is_graph_output():
                results[value] = None
            if view.is_integer(value):
                continue
            for user in view.users(value):
                if is_end(user):
                    ends[value] = None
                elif user not in seen:
                    seen.add(user)
                    if len(seen) > NODE_LIMIT:
                        raise RegionTooLarge
                    stack.append(user)
    return list(ends), list(results)
