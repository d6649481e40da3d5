"""Casts that do nothing: to the type that the value has already."""

from __future__ import annotations

import onnx_ir as ir

from ..graph import is_op
from ..passes import Pass
from ..result import PassReport


class RemoveIdleCasts(Pass):
    """Remove `Cast` nodes whose input has the target type. A narrowing and widening pair rounds, so it stays."""

    name = "remove-idle-casts"
    needs = frozenset({"types"})
    gives = frozenset({"casts"})

    def run(self, model: ir.Model, report: PassReport) -> None:
        for node in list(model.graph):
            if not is_op(node, "Cast") or node.outputs[0].is_graph_output():
                continue
            source = node.inputs[0]
            if source is None or source.dtype is None or source.dtype != ir.DataType(node.attributes["to"].as_int()):
                continue
            node.outputs[0].replace_all_uses_with(source)
            model.graph.remove(node, safe=True)
            report.matched += 1
        report.changed = report.matched > 0
