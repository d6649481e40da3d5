"""Values that are joined only to be split again."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ..graph import GraphView, attribute_int, is_op, rank_of, static_dims
from ..passes import Pass
from ..result import PassReport


class RemoveIdleSplits(Pass):
    """What takes a `Concat` apart again reads the parts themselves.

    That is a `Split` into the very parts that were joined, a `Slice` of one of them, and, where they have size one, a
    `Gather` of one. Complex numbers are written so, as pairs of a real and an imaginary part.
    """

    name = "remove-idle-splits"
    needs = frozenset({"folded"})

    def run(self, model: ir.Model, report: PassReport) -> None:
        view = GraphView(model.graph)
        for node in list(model.graph):
            if not is_op(node, "Gather", "Slice", "Split") or any(v.is_graph_output() for v in node.outputs):
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
    def _parts(view: GraphView, node: ir.Node) -> list[ir.Value] | None:
        """What a node gives, for each of its outputs."""
        joined = node.inputs[0]
        concat = None if joined is None else joined.producer()
        rank = None if joined is None else rank_of(joined)
        if concat is None or rank is None or not is_op(concat, "Concat"):
            return None
        axis = attribute_int(concat, "axis", 0) % rank
        parts = [v for v in concat.inputs if v is not None]
        known = [None if (d := static_dims(v)) is None else d[axis] for v in parts]
        dims = [d for d in known if d is not None]
        if len(dims) != len(concat.inputs):
            return None
        if is_op(node, "Split"):
            same = attribute_int(node, "axis", 0) % rank == axis and len(parts) == len(node.outputs)
            return parts if same and len(node.inputs) > 1 and view.ints(node.inputs[1]) == dims else None
        if is_op(node, "Slice"):
            return _sliced(view, node, axis, parts, dims)
        return _picked(view, node, axis, parts, dims)


def _sliced(view: GraphView, node: ir.Node, axis: int, parts: list[ir.Value], dims: list[int]) -> list[ir.Value] | None:
    """The one part that a Slice along the join's axis takes."""
    starts, ends, axes, steps = (view.ints(v) for v in [*node.inputs, None, None][1:5])
    rank = rank_of(parts[0])
    if rank is None or axes is None or starts is None or ends is None or steps not in (None, [1]):
        return None
    if (steps is None and len(node.inputs) > 4 and node.inputs[4] is not None) or [a % rank for a in axes] != [axis]:
        return None
    total, start = sum(dims), 0
    first, last, _ = slice(starts[0], ends[0]).indices(total)
    for part, width in zip(parts, dims, strict=True):
        if (first, last) == (start, start + width):
            return [part]
        start += width
    return None


def _picked(view: GraphView, node: ir.Node, axis: int, parts: list[ir.Value], dims: list[int]) -> list[ir.Value] | None:
    """The one part that a Gather along the join's axis takes, without that axis."""
    index, value = view.ints(node.inputs[1]), node.outputs[0]
    rank = rank_of(parts[0])
    if rank is None or attribute_int(node, "axis", 0) % rank != axis or rank_of(node.inputs[1]) != 0:  # type: ignore[arg-type]
        return None
    if not index or set(dims) != {1} or not -len(parts) <= index[0] < len(parts):
        return None
    graph = node.graph
    if graph is None:
        return None
    stem = f"{value.name}__part"
    at = ir.Value(
        name=f"{stem}_axis",
        type=ir.TensorType(ir.DataType.INT64),
        shape=ir.Shape([1]),
        const_value=ir.tensor(np.array([axis], np.int64), name=f"{stem}_axis"),
    )
    graph.initializers[at.name or ""] = at
    made = ir.node("Squeeze", [parts[index[0]], at], name=stem)
    made.outputs[0].name, made.outputs[0].type, made.outputs[0].shape = f"{stem}_0", value.type, value.shape
    graph.insert_before(node, made)
    return [made.outputs[0]]
