"""Branches whose condition is a constant: PyTorch's older exporter writes `squeeze` of an axis of unknown size so."""

from __future__ import annotations

import onnx_ir as ir

from ..graph import GraphView, is_op, subgraphs_of
from ..passes import Pass
from ..result import PassReport
from .constants import FoldConstants, LiftConstants
from .infer import InferTypes, infer_open


class InlineBranches(Pass):
    """Put the branch that is taken in the place of an `If` that always takes it."""

    name = "inline-branches"
    needs = frozenset({"folded"})

    def run(self, model: ir.Model, report: PassReport) -> None:
        report.matched = sum(
            _inline(model.graph, GraphView(model.graph), n) for n in list(model.graph) if is_op(n, "If")
        )
        if not report.matched:
            return
        report.changed = True
        inner = PassReport("")
        LiftConstants().run(model, inner)
        infer_open(model)
        for more in (InferTypes(), FoldConstants()):
            more.run(model, inner)


def _inline(graph: ir.Graph, view: GraphView, node: ir.Node) -> bool:
    """One `If`; False where its condition is computed, or it gives outputs of the model."""
    given = view.array(node.inputs[0])
    if given is None or given.size != 1 or any(v.is_graph_output() for v in node.outputs):
        return False
    branch = node.attributes["then_branch" if bool(given.reshape(-1)[0]) else "else_branch"].as_graph()
    if any(subgraphs_of(n) for n in branch):
        return False
    stem = node.name or node.outputs[0].name
    for name, value in list(branch.initializers.items()):
        del branch.initializers[name]
        value.name = f"{stem}.{name}"
        graph.register_initializer(value)
    results = list(branch.outputs)
    branch.outputs.clear()
    for inner in list(branch):
        branch.remove(inner)
        inner.name = f"{stem}.{inner.name}"
        for value in inner.outputs:
            value.name = f"{stem}.{value.name}"
        graph.insert_before(node, inner)
    for value, result in zip(node.outputs, results, strict=True):
        if result.shape is None:
            result.shape = value.shape
        if result.type is None:
            result.type = value.type
        value.replace_all_uses_with(result)
    graph.remove(node, safe=True)
    return True
