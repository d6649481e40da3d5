"""Sequences that only carry the parts of a split: `SplitToSequence` with `SequenceAt` becomes `Split`."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ..graph import GraphView, attribute_int, is_op, static_dims
from ..passes import Pass
from ..result import PassReport


def _sizes(view: GraphView, node: ir.Node) -> np.ndarray | None:
    """Lengths of the parts: given as a list, or as one length for all but the last."""
    given = view.array(node.inputs[1]) if len(node.inputs) > 1 and node.inputs[1] is not None else None
    if given is None:
        return None
    if given.ndim == 1:
        return given.astype(np.int64)
    dims = static_dims(node.inputs[0]) if node.inputs[0] is not None else None
    whole = None if dims is None else dims[attribute_int(node, "axis", 0)]
    length = int(given)
    if whole is None or length < 1:
        return None
    parts = [length] * (whole // length) + ([whole % length] if whole % length else [])
    return np.array(parts, np.int64)


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
        sizes = _sizes(view, node)
        users = view.users(sequence)
        if sizes is None or sequence.is_graph_output() or not users:
            return 0
        picks: list[tuple[ir.Node, int]] = []
        for user in users:
            index = view.scalar(user.inputs[1]) if is_op(user, "SequenceAt") else None
            if index is None:
                return 0
            picks.append((user, int(index) % len(sizes)))
        lengths = ir.Value(
            name=f"{sequence.name}_sizes",
            shape=ir.Shape([len(sizes)]),
            type=ir.TensorType(ir.DataType.INT64),
            const_value=ir.tensor(sizes, name=f"{sequence.name}_sizes"),
        )
        graph.register_initializer(lengths)
        split = ir.node(
            "Split",
            [node.inputs[0], lengths],
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
