"""Equal nodes made one: every layer cuts its own cosines from the shared ones."""

from __future__ import annotations

import onnx_ir as ir

from ..graph import GraphView, is_op
from .elements import Unknown
from .symbolic import Symbolic

#: Largest table whose entries are compared, in elements.
_TABLE = 1 << 20
_OPS = ("Cast", "Cos", "Gather", "GatherND", "Sin", "Slice", "Squeeze", "Transpose", "Unsqueeze")
#: The same where angles are made of positions, and cosines of angles: some layers make their own.
_ANGLES = ("Concat", "Expand", "MatMul", "Mul", "Reshape", "Split", "Tile")


def merge_equal(graph: ir.Graph) -> int:
    """Let one node stand for all that do the same to the same values; gives how many went. No value changes."""
    view = GraphView(graph)
    symbolic = Symbolic(view)
    first: dict[tuple[object, ...], ir.Node] = {}
    count = 0
    for node in list(graph):
        if (
            not (is_op(node, *_OPS) or (is_op(node, *_ANGLES) and (_of_angles(node) or _of_table(view, node))))
            or any(v.is_graph_output() for v in node.outputs)
            or view.is_const(node.outputs[0])
        ):
            continue
        key = _key(view, symbolic, node)
        known = first.setdefault(key, node)
        if known is not node:
            for same, value in zip(node.outputs, known.outputs, strict=True):
                same.replace_all_uses_with(value)
            graph.remove(node, safe=True)
            count += 1
    return count


def _of_angles(node: ir.Node) -> bool:
    """Do a cosine or a sine come out of it, or go into it?"""
    if any(v is not None and is_op(v.producer(), "Cos", "Sin") for v in node.inputs):
        return True
    stack, seen = [node], {node}
    while stack and len(seen) < 16:
        for user, _ in (use for value in stack.pop().outputs for use in value.uses()):
            if is_op(user, "Cos", "Sin"):
                return True
            if user not in seen and is_op(user, *_OPS, *_ANGLES):
                seen.add(user)
                stack.append(user)
    return False


def _of_table(view: GraphView, node: ir.Node) -> bool:
    """Are they rows of a constant table, moved?"""
    value = node.inputs[0]
    for _ in range(8):
        producer = None if value is None else value.producer()
        if value is None or producer is None or view.is_const(value):
            return value is not None and view.is_const(value)
        if not is_op(producer, *_OPS, *_ANGLES):
            return False
        value = producer.inputs[0]
    return False


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
            inputs.append(_table(view, value))
    attributes = tuple((n, str(a.value)) for n, a in sorted(node.attributes.items()))
    return (node.op_type, len(node.outputs), *inputs, attributes)
