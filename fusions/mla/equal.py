"""Equal nodes made one: every layer cuts its own cosines from the shared ones."""

from __future__ import annotations

import onnx_ir as ir

from ..graph import GraphView, is_op
from .elements import Unknown
from .symbolic import Symbolic

#: Largest table whose entries are compared, in elements.
_TABLE = 1 << 20
_OPS = ("Cast", "Cos", "Gather", "GatherND", "Sin", "Slice", "Squeeze", "Transpose", "Unsqueeze")


def merge_equal(graph: ir.Graph) -> int:
    """Let one node stand for all that do the same to the same values; gives how many went. No value changes."""
    view = GraphView(graph)
    symbolic = Symbolic(view)
    first: dict[tuple[object, ...], ir.Node] = {}
    count = 0
    for node in list(graph):
        if not is_op(node, *_OPS) or node.outputs[0].is_graph_output() or view.is_const(node.outputs[0]):
            continue
        key = _key(view, symbolic, node)
        known = first.setdefault(key, node)
        if known is not node:
            node.outputs[0].replace_all_uses_with(known.outputs[0])
            graph.remove(node, safe=True)
            count += 1
    return count


def _table(view: GraphView, value: ir.Value | None) -> object:
    """A table of constants by its entries: folding makes one of its own for every use."""
    tensor = None if value is None or not view.is_const(value) else value.const_value
    if tensor is None or tensor.size > _TABLE:
        return value
    return tensor.dtype, tuple(tensor.shape), tensor.tobytes()


def _key(view: GraphView, symbolic: Symbolic, node: ir.Node) -> tuple[object, ...]:
    """What tells a node's result: its operation and inputs, places by what they are, however they are computed."""
    inputs: list[object] = [_table(view, node.inputs[0])]
    for value in node.inputs[1:]:
        array = None if value is None or not view.is_const(value) or value.dtype is None else view.array(value)
        if array is not None and array.size <= 16 and array.dtype.kind in "iu":
            inputs.append((array.shape, *array.reshape(-1).tolist()))
        elif value is not None and array is None and view.is_integer(value):
            try:
                inputs.append(symbolic(value))
            except Unknown:
                inputs.append(value)
        else:
            inputs.append(value)
    attributes = tuple((n, str(a.value)) for n, a in sorted(node.attributes.items()))
    return (node.op_type, *inputs, attributes)
