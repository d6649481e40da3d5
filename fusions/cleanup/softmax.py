"""Softmax written out: `exp(x - max(x)) / sum(exp(x - max(x)))`.

ONNX Runtime's optimiser writes it so where its CPU has no kernel for the type (float16), and people do by hand.
"""

from __future__ import annotations

import onnx_ir as ir

from ..graph import GraphView, attribute_int, is_op, rank_of
from ..passes import Pass
from ..result import PassReport


class JoinSoftmax(Pass):
    """One `Softmax` node for the five that compute it."""

    name = "join-softmax"
    needs = frozenset({"folded", "types"})

    def run(self, model: ir.Model, report: PassReport) -> None:
        if model.graph.opset_imports.get("", 13) < 13:
            return  # Softmax was over all axes from its own on
        view = GraphView(model.graph)
        for node in list(model.graph):
            found = _softmax_of(view, node)
            if found is None:
                continue
            x, axis = found
            made = ir.node("Softmax", [x], {"axis": axis}, name=node.name)
            old, new = node.outputs[0], made.outputs[0]
            new.type, new.shape = old.type, old.shape
            model.graph.insert_before(node, made)
            old.replace_all_uses_with(new, replace_graph_outputs=True)
            new.name, old.name = old.name, None
            _remove(model.graph, node)
            report.matched += 1
        report.changed = report.matched > 0


def _softmax_of(view: GraphView, node: ir.Node) -> tuple[ir.Value, int] | None:
    """(x, axis) of the softmax that a quotient ends."""
    if not is_op(node, "Div") or len(node.inputs) != 2:
        return None
    top, below = node.inputs
    exp = None if top is None else top.producer()
    total = None if below is None else below.producer()
    if exp is None or total is None or not is_op(exp, "Exp") or not is_op(total, "ReduceSum"):
        return None
    shifted = None if exp.inputs[0] is None else exp.inputs[0].producer()
    if total.inputs[0] is not top or shifted is None or not is_op(shifted, "Sub"):
        return None
    x = shifted.inputs[0]
    largest = None if shifted.inputs[1] is None else shifted.inputs[1].producer()
    if x is None or largest is None or not is_op(largest, "ReduceMax") or largest.inputs[0] is not x:
        return None
    axes = [_axis(view, n) for n in (total, largest)]
    if axes[0] is None or axes[0] != axes[1] or x.dtype is None or x.dtype != node.outputs[0].dtype:
        return None
    return x, axes[0]


def _axis(view: GraphView, node: ir.Node) -> int | None:
    """The one axis that is reduced and kept, counted from the start."""
    rank = None if node.inputs[0] is None else rank_of(node.inputs[0])
    if not attribute_int(node, "keepdims", 1) or rank is None:
        return None
    attribute = node.attributes.get("axes")
    axes = view.ints(node.inputs[1]) if len(node.inputs) > 1 else None
    if attribute is not None:
        axes = list(attribute.as_ints())
    return axes[0] % rank if axes is not None and len(axes) == 1 else None


def _remove(graph: ir.Graph, node: ir.Node) -> None:
    """A node and, from it back, what nothing else reads."""
    sources = [v.producer() for v in dict.fromkeys(node.inputs) if v is not None]
    graph.remove(node, safe=True)
    for source in sources:
        if source is not None and is_op(source, "Exp", "ReduceSum", "Sub", "ReduceMax"):
            if source.graph is not None and not any(v.uses() or v.is_graph_output() for v in source.outputs):
                _remove(graph, source)
