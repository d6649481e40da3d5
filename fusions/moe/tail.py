"""What follows the routed experts: casts, a factor, the shared expert."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from ..graph import FLOAT_TYPES, is_op
from .linear import Linear, read_linear
from .mlp import Mlp, read_mlp
from .reader import Reader, takes_the_only_one

#: Why a shared expert stays outside.
GATE = "the gate of the shared expert has a bias or is quantized: it stays beside the node"
_ONWARDS = ("Cast", "Identity", "Reshape", "Squeeze", "Unsqueeze")


@dataclass(frozen=True)
class Shared:
    """The shared expert, and the layer whose sigmoid it is multiplied by."""

    mlp: Mlp
    gate: Linear | None


@dataclass(frozen=True)
class End:
    """A value that the op's result may stand for: the routed experts times ``scale``, and the shared one or not."""

    y: ir.Value
    scale: float
    shared: Shared | None


def read_shared(r: Reader, value: ir.Value | None) -> Shared | None:
    """The shared expert that gives a value."""
    base = r.moved(value)
    node = r.attempt(_product, base)
    if node is not None:
        return node
    mlp = r.attempt(read_mlp, base)
    return None if mlp is None or not _plain(mlp) else Shared(mlp, None)


def _product(r: Reader, value: ir.Value | None) -> Shared | None:
    """The expert times the sigmoid of its gate."""
    node = r.node(value, "Mul")
    if node is None:
        return None
    for gate, output in (node.inputs, node.inputs[::-1]):
        sigmoid = r.node(r.moved(gate), "Sigmoid")
        layer = None if sigmoid is None else read_linear(r, r.moved(sigmoid.inputs[0]))
        if layer is None or layer.width != 1:
            continue
        if layer.bias is not None or layer.seen.quantized:
            r.refuse(GATE)
            continue
        mlp = r.attempt(read_mlp, output)
        if mlp is not None and _plain(mlp):
            return Shared(mlp, layer)
    return None


def _plain(mlp: Mlp) -> bool:
    layers = [mlp.down, mlp.gate.linear, *([] if mlp.up is None else [mlp.up.linear])]
    return not mlp.factors and all(x.expert is None and x.ids is None for x in layers)


def read_ends(r: Reader, value: ir.Value) -> list[End]:
    """Where the block may end, the latest first."""
    found = [End(value, 1.0, None)]
    while True:
        last = found[0]
        users = [n for n in r.view.users(last.y) if not is_op(n, "Shape")]
        if len(users) != 1 or last.y.is_graph_output():
            return found
        node = users[0]
        level = r.marks.level()
        r.marks.add(node)
        y = node.outputs[0]
        onwards = is_op(node, *_ONWARDS) or takes_the_only_one(r.view, node)
        if onwards and node.inputs[0] is last.y and y.dtype in FLOAT_TYPES:
            found.insert(0, End(y, last.scale, last.shared))
            continue
        other = next((v for v in node.inputs if v is not last.y), None)
        if is_op(node, "Mul") and (number := r.scalar(other)) is not None and last.shared is None:
            found.insert(0, End(y, last.scale * number, None))
            continue
        if is_op(node, "Add") and last.shared is None and other is not None:
            shared = r.attempt(read_shared, other)
            if shared is not None:
                found.insert(0, End(y, last.scale, shared))
                continue
            r.refuse(f"what {node.name!r} adds to the routed experts is no shared expert")
        r.marks.back(level)
        return found
