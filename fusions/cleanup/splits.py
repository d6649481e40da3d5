"""Values that are joined only to be split again."""

from __future__ import annotations

import onnx_ir as ir

from ..graph import GraphView, attribute_int, is_op, static_dims
from ..passes import Pass
from ..result import PassReport


class RemoveIdleSplits(Pass):
    """`Split` of a `Concat` into the very parts that were joined: the parts themselves."""

    name = "remove-idle-splits"
    needs = frozenset({"folded"})

    def run(self, model: ir.Model, report: PassReport) -> None:
        view = GraphView(model.graph)
        for node in list(model.graph):
            if not is_op(node, "Split") or any(v.is_graph_output() for v in node.outputs):
                continue
            parts = self._parts(view, node)
            if parts is None:
                continue
            for old, new in zip(node.outputs, parts, strict=True):
                old.replace_all_uses_with(new)
            model.graph.remove(node, safe=True)
            report.matched += 1
        report.changed = report.matched > 0

    @staticmethod
    def _parts(view: GraphView, split: ir.Node) -> list[ir.Value] | None:
        joined = split.inputs[0]
        concat = None if joined is None else joined.producer()
        rank = None if joined is None or joined.shape is None else len(joined.shape)
        if concat is None or rank is None or not is_op(concat, "Concat") or len(concat.inputs) != len(split.outputs):
            return None
        axis = attribute_int(split, "axis", 0) % rank
        sizes = view.ints(split.inputs[1]) if len(split.inputs) > 1 else None
        parts = [v for v in concat.inputs if v is not None]
        dims = [None if (d := static_dims(v)) is None else d[axis] for v in parts]
        if attribute_int(concat, "axis", 0) % rank != axis or None in dims or sizes != dims:
            return None
        return parts
