"""Products and quotients with one: exporters leave them where a factor is a default."""

from __future__ import annotations

import onnx_ir as ir

from ..graph import GraphView, is_op
from ..passes import Pass
from ..result import PassReport


class RemoveUnitFactors(Pass):
    """``x * 1`` and ``x / 1`` with a scalar one are x, to the bit."""

    name = "remove-unit-factors"
    needs = frozenset({"folded"})

    def run(self, model: ir.Model, report: PassReport) -> None:
        view = GraphView(model.graph)
        for node in list(model.graph):
            if not is_op(node, "Mul", "Div") or node.outputs[0].is_graph_output():
                continue
            pairs = [(node.inputs[0], node.inputs[1])]
            if node.op_type == "Mul":
                pairs.append((node.inputs[1], node.inputs[0]))
            for x, one in pairs:
                if x is None or one is None or not view.is_const(one):
                    continue
                array = view.array(one)
                if array is not None and array.ndim == 0 and float(array) == 1.0 and x.dtype == one.dtype is not None:
                    node.outputs[0].replace_all_uses_with(x)
                    model.graph.remove(node, safe=True)
                    report.matched += 1
                    break
        report.changed = report.matched > 0
