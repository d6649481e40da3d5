"""Targets of `Expand` as PyTorch's older exporter makes them: `Where(sizes == -1, 1, sizes)`, where -1 keeps an axis.

Sizes of tensors are never -1, so that only constants can be: the choice is known without running it.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as common

from ..graph import GraphView, is_op
from ..passes import Pass
from ..result import PassReport

_KEEPS = ("Gather", "Identity", "Reshape", "Slice", "Squeeze", "Unsqueeze")


class SpellExpands(Pass):
    """Give an `Expand` its sizes themselves."""

    name = "spell-expands"
    needs = frozenset({"folded"})

    def run(self, model: ir.Model, report: PassReport) -> None:
        view = GraphView(model.graph)
        for node in list(model.graph):
            if not is_op(node, "Expand"):
                continue
            sizes = _chosen(view, node.inputs[1])
            spelt = None if sizes is None else _spelt(view, model.graph, node, sizes)
            if spelt is not None:
                node.replace_input_with(1, spelt)
                report.matched += 1
        if report.matched:
            report.changed = True
            common.RemoveUnusedNodesPass()(model)


def _chosen(view: GraphView, target: ir.Value | None) -> ir.Value | None:
    """``sizes`` of `Where(Equal(sizes, -1), 1, sizes)`."""
    where = None if target is None else target.producer()
    if where is None or not is_op(where, "Where"):
        return None
    cond, ones, sizes = where.inputs
    equal = None if cond is None else cond.producer()
    if equal is None or sizes is None or not is_op(equal, "Equal"):
        return None
    others = [v for v in equal.inputs if v is not sizes]
    if len(others) != 1 or not _all(view, others[0], -1) or not _all(view, ones, 1):
        return None
    return sizes


def _all(view: GraphView, value: ir.Value | None, number: int) -> bool:
    array = None if value is None or not view.is_const(value) else view.array(value)
    return array is not None and array.size > 0 and bool(np.all(array == number))


def _spelt(view: GraphView, graph: ir.Graph, node: ir.Node, sizes: ir.Value) -> ir.Value | None:
    """The sizes with ones for the -1 among their constants; None where another part may be -1."""
    if not_negative(view, sizes):
        return sizes
    concat = sizes.producer()
    while concat is not None and is_op(concat, "Reshape", "Identity") and concat.inputs[0] is not None:
        if concat.inputs[0].shape is None or len(concat.inputs[0].shape) != 1:
            return None
        concat = concat.inputs[0].producer()
    if concat is None or not is_op(concat, "Concat"):
        return None
    parts: list[ir.Value] = []
    for part in concat.inputs:
        if part is not None and not_negative(view, part):
            parts.append(part)
        elif part is not None and _all(view, part, -1) and part.shape is not None and part.dtype is not None:
            name = f"{part.name}__one"
            if name not in graph.initializers:
                ones = np.ones(part.shape.numpy(), part.dtype.numpy())
                shape, kind = ir.Shape(ones.shape), ir.TensorType(part.dtype)
                made = ir.Value(name=name, shape=shape, type=kind, const_value=ir.tensor(ones, name=name))
                graph.register_initializer(made)
            parts.append(graph.initializers[name])
        else:
            return None
    joined = ir.node("Concat", parts, {"axis": 0}, name=f"{node.name}__sizes")
    joined.outputs[0].name = f"{node.outputs[0].name}__sizes"
    joined.outputs[0].type, joined.outputs[0].shape = sizes.type, sizes.shape
    graph.insert_before(node, joined)
    return joined.outputs[0]


def not_negative(view: GraphView, value: ir.Value | None, depth: int = 16) -> bool:
    """Are all entries sizes, or made of sizes so that none is below zero?"""
    if value is None or not depth:
        return False
    if view.is_const(value):
        array = view.array(value)
        return array is not None and array.dtype.kind in "iu" and bool(np.all(array >= 0))
    producer = value.producer()
    if producer is None:
        return False
    if is_op(producer, "Shape", "Size"):
        return True
    if is_op(producer, *_KEEPS):
        return not_negative(view, producer.inputs[0], depth - 1)
    if is_op(producer, "Concat", "Add", "Mul"):
        return all(not_negative(view, v, depth - 1) for v in producer.inputs)
    return False
