"""Products and quotients with one: exporters leave them where a factor is a default."""

from __future__ import annotations

import onnx_ir as ir

from ..graph import GraphView, is_op
from ..passes import Pass
from ..result import PassReport


class RemoveUnitFactors(Pass):
    """``x * 1`` and ``x / 1`` with one number are x, to the bit."""

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
                if array is None or array.size != 1 or x.dtype != one.dtype or x.dtype is None:
                    continue
                # with as many axes as x at most, else the product has more than x
                kept = array.ndim == 0 or (x.shape is not None and array.ndim <= len(x.shape))
                if kept and float(array.reshape(-1)[0]) == 1.0:
                    node.outputs[0].replace_all_uses_with(x)
                    model.graph.remove(node, safe=True)
                    report.matched += 1
                    break
        report.changed = report.matched > 0
