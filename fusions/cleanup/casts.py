"""Casts that do nothing: to the type that the value has already."""

from __future__ import annotations

import onnx_ir as ir

from ..graph import is_op
from ..passes import Pass
from ..result import PassReport


class RemoveIdleCasts(Pass):
    """Remove `Cast` nodes whose input has the target type, and turn `CastLike` into `Cast`.

    A narrowing and widening pair rounds, so it stays.
    """

    name = "remove-idle-casts"
    needs = frozenset({"types"})
    gives = frozenset({"casts"})

    def run(self, model: ir.Model, report: PassReport) -> None:
        for node in list(model.graph):
            if is_op(node, "CastLike"):
                node = self._as_cast(model.graph, node)
            if not is_op(node, "Cast") or node.outputs[0].is_graph_output():
                continue
            source = node.inputs[0]
            if source is None or source.dtype is None or source.dtype != ir.DataType(node.attributes["to"].as_int()):
                continue
            node.outputs[0].replace_all_uses_with(source)
            model.graph.remove(node, safe=True)
            report.matched += 1
        report.changed = report.matched > 0

    @staticmethod
    def _as_cast(graph: ir.Graph, node: ir.Node) -> ir.Node:
        """A `Cast` in the place of a `CastLike` whose model's type is known; else the node itself."""
        source, like = node.inputs
        if source is None or like is None or like.dtype is None:
            return node
        cast = ir.node("Cast", [source], {"to": like.dtype.value}, name=node.name)
        old, new = node.outputs[0], cast.outputs[0]
        graph.insert_before(node, cast)
        new.type, new.shape = ir.TensorType(like.dtype), old.shape
        old.replace_all_uses_with(new, replace_graph_outputs=True)
        graph.remove(node, safe=True)
        new.name = old.name
        return cast
