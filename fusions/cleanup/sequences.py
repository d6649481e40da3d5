"""Sequences that only carry the parts of a split: `SplitToSequence` with `SequenceAt` becomes `Split`."""

from __future__ import annotations

import onnx_ir as ir

from ..graph import GraphView, attribute_int, is_op
from ..passes import Pass
from ..result import PassReport


class SplitSequences(Pass):
    """Exporters that do not optimise split into a sequence and pick its parts; `Split` does the same in one node."""

    name = "split-sequences"
    needs = frozenset({"constants"})

    def run(self, model: ir.Model, report: PassReport) -> None:
        splits = [n for n in model.graph if is_op(n, "SplitToSequence")]
        if not splits:
            return
        view = GraphView(model.graph)
        for node in splits:
            report.matched += self._rewrite(model.graph, view, node)
        report.changed = report.matched > 0

    @staticmethod
    def _rewrite(graph: ir.Graph, view: GraphView, node: ir.Node) -> int:
        sequence = node.outputs[0]
        sizes = view.array(node.inputs[1]) if len(node.inputs) > 1 else None
        users = view.users(sequence)
        if sizes is None or sizes.ndim != 1 or sequence.is_graph_output() or not users:
            return 0
        picks: list[tuple[ir.Node, int]] = []
        for user in users:
            index = view.scalar(user.inputs[1]) if is_op(user, "SequenceAt") else None
            if index is None:
                return 0
            picks.append((user, int(index) % len(sizes)))
        split = ir.node(
            "Split",
            [node.inputs[0], node.inputs[1]],
            {"axis": attribute_int(node, "axis", 0)},
            num_outputs=len(sizes),
            name=node.name,
        )
        for i, value in enumerate(split.outputs):
            value.name = f"{sequence.name}_part{i}"
        graph.insert_before(node, split)
        for user, index in picks:
            old, new = user.outputs[0], split.outputs[index]
            new.type, new.shape = old.type, old.shape
            old.replace_all_uses_with(new, replace_graph_outputs=True)
            if any(o is new for o in graph.outputs):
                old.name, new.name = new.name, old.name
            graph.remove(user, safe=True)
        graph.remove(node, safe=True)
        return 1
