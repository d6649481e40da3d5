"""Splice accepted candidates into the graph."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir
import onnx_ir.passes.common as common

from .candidate import Candidate
from .graph import GraphView, subgraphs_of
from .replacement import Given, replacement


@dataclass(frozen=True)
class Accepted:
    """A candidate that is to be applied, with the op's parameters (:func:`replacement.given_parameters`)."""

    candidate: Candidate
    parameters: dict[str, Given]


class UniqueNames:
    """Makes names that no value and no node of the graph has."""

    def __init__(self, graph: ir.Graph) -> None:
        self._used: set[str] = {v.name for v in graph.inputs if v.name} | set(graph.initializers)
        for node in graph.all_nodes():
            self._used.update(v.name for v in node.outputs if v.name)
            if node.name:
                self._used.add(node.name)

    def __call__(self, hint: str) -> str:
        name, count = hint, 1
        while name in self._used:
            count += 1
            name = f"{hint}_{count}"
        self._used.add(name)
        return name


def rewrite(model: ir.Model, view: GraphView, accepted: list[Accepted]) -> None:
    """Apply all candidates, drop what nothing reads any more, and bring the nodes in order."""
    graph = model.graph
    names = UniqueNames(graph)
    for i, item in enumerate(accepted):
        candidate = item.candidate
        bind = {v: v for v in candidate.input_values()}
        prefix = names(f"{candidate.op.key}.{i}")
        built = replacement(candidate, bind, item.parameters, names, prefix, graph.opset_imports[""])
        anchor = max(
            (p for v in candidate.output_values() if (p := v.producer()) is not None), key=view.position.__getitem__
        )
        for value in built.initializers:
            graph.register_initializer(value)
        graph.insert_before(anchor, built.nodes)
        assert built.function is not None
        candidate.op.attach(model, built.function)
        for old, new in built.outputs.items():
            _take_over(graph, old, new, names)
    remove_unused(model)
    graph.sort()


def remove_unused(model: ir.Model) -> None:
    """Drop nodes and initializers that nothing reads.

    A removed `Loop`, `Scan` or `If` lets go of what its bodies read: onnx-ir's pass leaves those uses standing.
    """
    holders = [n for n in model.graph if subgraphs_of(n)]
    while True:
        common.RemoveUnusedNodesPass()(model)
        gone = [n for n in holders if n.graph is None]
        if not gone:
            return
        holders = [n for n in holders if n.graph is not None]
        for node in gone:
            _let_go(node)


def _let_go(node: ir.Node) -> None:
    for graph in subgraphs_of(node):
        for inner in graph:
            for i in range(len(inner.inputs)):
                inner.replace_input_with(i, None)
            _let_go(inner)


def _take_over(graph: ir.Graph, old: ir.Value, new: ir.Value, names: UniqueNames) -> None:
    """Let everything that read ``old`` read ``new``; a graph output keeps its name, type and shape."""
    old.replace_all_uses_with(new, replace_graph_outputs=True) if old.is_graph_output() else old.replace_all_uses_with(
        new
    )
    if any(o is new for o in graph.outputs):
        name = old.name
        old.name = names(f"{name}_before")
        new.name = name
        if old.shape is not None:
            new.shape = old.shape
        if old.type is not None:
            new.type = old.type
