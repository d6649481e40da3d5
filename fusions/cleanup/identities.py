"""Identities: nodes that hand a value on unchanged."""

from __future__ import annotations

import onnx_ir as ir

from ..graph import is_op
from ..passes import Pass
from ..result import PassReport


class RemoveIdentities(Pass):
    """Remove the main graph's `Identity` nodes, but for those that give a graph output its name.

    Those of subgraphs stay: a branch may hand an outer value on only through one.
    """

    name = "remove-identities"
    gives = frozenset({"identities"})

    def run(self, model: ir.Model, report: PassReport) -> None:
        for node in list(model.graph):
            if not is_op(node, "Identity") or node.inputs[0] is None or node.outputs[0].is_graph_output():
                continue
            source, copy = node.inputs[0], node.outputs[0]
            if source.shape is None:
                source.shape = copy.shape
            copy.replace_all_uses_with(source)
            model.graph.remove(node, safe=True)
            report.matched += 1
        report.changed = report.matched > 0
