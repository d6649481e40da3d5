"""A cache of latents as the model's own input and output: what is between them and the fused node, and who reads sizes.

Exports hold latents as ``[B, P, R]``, or as ``[B, 1, P, R]`` with a ``Reshape`` on either side of the node.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import onnx_ir as ir

from ...custom_ops.common.refusal import Refusal
from ..graph import attribute_int, is_op

#: Ops that leave a cache's rows as they are.
_MOVES = ("Reshape", "Squeeze", "Unsqueeze", "Identity", "Cast")
CODE = "cache"


@dataclass
class Port:
    """One end of a cache.

    Attributes:
        value: the model's input or output.
        batch, length: its sizes before the channels.
        moves: the nodes between it and the fused node.
        readers: the nodes that read sizes of it, and which of its sizes each of their values' axes is.
    """

    value: ir.Value
    batch: int | ir.SymbolicDim
    length: int | ir.SymbolicDim
    moves: list[ir.Node] = field(default_factory=list)
    readers: list[tuple[ir.Node, tuple[str, ...]]] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.value.name or ""


def past_port(past: ir.Value, node: ir.Node, role: str) -> Port | Refusal:
    """The model's input that a node's past cache is, if it is that and nothing else."""
    moves: list[ir.Node] = []
    path = [past]
    while (producer := path[-1].producer()) is not None:
        before = producer.inputs[0] if producer.inputs else None
        if not is_op(producer, *_MOVES) or before is None:
            return _refused(f"{role} is made in the graph, by a node {producer.op_type}, and not an input of the model")
        moves.append(producer)
        path.append(before)
    if not path[-1].is_graph_input():
        return _refused(f"{role} is not an input of the model")
    return _port(path[-1], path, {*moves, node}, moves, role)


def present_port(present: ir.Value, role: str) -> Port | Refusal:
    """The model's output that a node's present cache is, if it is that and nothing else."""
    moves: list[ir.Node] = []
    path = [present]
    while not path[-1].is_graph_output():
        users = {u for u, _ in path[-1].uses() if not is_op(u, "Shape")}
        if len(users) != 1 or not is_op(user := next(iter(users)), *_MOVES):
            what = ", ".join(sorted(u.op_type for u in users)) or "nothing"
            return _refused(f"{role} is not an output of the model: {what} reads it")
        moves.append(user)
        path.append(user.outputs[0])
    return _port(path[-1], path, set(moves), moves, role)


def _port(value: ir.Value, path: list[ir.Value], own: set[ir.Node], moves: list[ir.Node], role: str) -> Port | Refusal:
    names = _axes(value)
    if names is None:
        return _refused(f"{role} is {_shape(value)}: expected [batch, tokens, channels], or with one head")
    assert value.shape is not None
    port = Port(value, value.shape[0], value.shape[names.index("length")], moves)
    for step in path:
        for user in {u for u, _ in step.uses()} - own:
            axes = _axes(step)
            if not is_op(user, "Shape") or axes is None:
                return _refused(f"{user.op_type} {user.name or ''} reads {role} too".replace("  ", " "))
            start, end = attribute_int(user, "start", 0), attribute_int(user, "end", len(axes))
            port.readers.append((user, axes[start if start >= 0 else start + len(axes) : end]))
    if any(step.is_graph_output() for step in path if step is not value):
        return _refused(f"{role} is another output of the model too")
    return port


def _axes(value: ir.Value) -> tuple[str, ...] | None:
    """What each axis of a cache's value is."""
    dims = None if value.shape is None else list(value.shape)
    if dims is None or len(dims) not in (3, 4):
        return None
    if len(dims) == 3:
        return ("batch", "length", "width")
    if dims[1] == 1:
        return ("batch", "head", "length", "width")
    return ("batch", "length", "head", "width") if dims[2] == 1 else None


def _shape(value: ir.Value) -> str:
    return "of a shape that is not known" if value.shape is None else f"of shape {dims_of(value)}"


def dims_of(value: ir.Value) -> list[int | str]:
    """A value's sizes as numbers and names; "?" where one has neither."""
    return [d if isinstance(d, int) else str(d.value) if d.value is not None else "?" for d in value.shape or ()]


def redirect(model: ir.Model, port: Port, sized: ir.Value, width: int) -> None:
    """Let those that read a cache's sizes read them of ``sized``, [B, P, any number]; ``width`` is what it had last."""
    graph = model.graph
    for node, axes in port.readers:
        if len(axes) == 1 and axes[0] in ("batch", "length"):
            at = ("batch", "length").index(axes[0])
            node.replace_input_with(0, sized)
            node.attributes["start"] = ir.AttrInt64("start", at)
            node.attributes["end"] = ir.AttrInt64("end", at + 1)
            continue
        parts: list[ir.Value] = []
        for i, axis in enumerate(axes):
            stem = f"{node.outputs[0].name}.{i}"
            if axis in ("batch", "length"):
                at = ("batch", "length").index(axis)
                made = ir.node("Shape", [sized], {"start": at, "end": at + 1}, num_outputs=1, name=stem)
            else:
                size = ir.tensor([1 if axis == "head" else width], dtype=ir.DataType.INT64)
                made = ir.node("Constant", [], {"value": size}, num_outputs=1, name=stem)
            made.outputs[0].name = stem
            made.outputs[0].type = ir.TensorType(ir.DataType.INT64)
            parts.append(made.outputs[0])
            (node.graph or graph).insert_before(node, made)
        joined = ir.node("Concat", parts, {"axis": 0}, num_outputs=1, name=f"{node.outputs[0].name}.all")
        (node.graph or graph).insert_before(node, joined)
        old, new = node.outputs[0], joined.outputs[0]
        new.type, new.shape = old.type, old.shape
        new.name, old.name = old.name, f"{old.name}.before"
        old.replace_all_uses_with(new, replace_graph_outputs=True)
        (node.graph or graph).remove(node, safe=True)


def _refused(reason: str) -> Refusal:
    return Refusal(CODE, reason)
