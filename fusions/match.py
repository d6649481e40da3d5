"""Small blocks in their several op sequences: SiLU, softplus, L2 and RMS norms. Each is matched from its last node."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from .graph import GraphView, attribute_float, attribute_int, is_op, rank_of


def through(value: ir.Value | None, *op_types: str) -> ir.Value | None:
    """Walk back through single-input nodes of these types."""
    while value is not None:
        producer = value.producer()
        if not is_op(producer, *op_types) or producer is None:
            return value
        value = producer.inputs[0]
    return None


def uncast(value: ir.Value | None) -> ir.Value | None:
    """The value before any casts."""
    return through(value, "Cast", "Identity")


def same(a: ir.Value | None, b: ir.Value | None) -> bool:
    """The same value, casts aside."""
    return a is not None and (a is b or uncast(a) is uncast(b))


@dataclass(frozen=True)
class Norm:
    """``y = x / norm(x)`` over the last axis. kind: "sum" sqrt(sum x^2 + eps), "max" max(sqrt(sum x^2), eps),
    "rms" sqrt(mean x^2 + eps)."""

    kind: str
    x: ir.Value
    y: ir.Value
    epsilon: float


def _last_axis(view: GraphView, node: ir.Node, x: ir.Value) -> bool:
    """Does the reduction run over the last axis, keeping it?"""
    if "keepdims" in node.attributes and node.attributes["keepdims"].as_int() != 1:
        return False
    if "axes" in node.attributes:
        axes: list[int] | None = list(node.attributes["axes"].as_ints())
    else:
        axes = view.ints(node.inputs[1]) if len(node.inputs) > 1 else None
    if axes is None or len(axes) != 1:
        return False
    rank = rank_of(x)
    return axes[0] == -1 or (rank is not None and axes[0] == rank - 1)


def square_of(view: GraphView, value: ir.Value | None) -> ir.Value | None:
    """x, when the value is x*x or x^2."""
    producer = None if value is None else value.producer()
    if producer is None:
        return None
    if is_op(producer, "Mul") and same(producer.inputs[0], producer.inputs[1]):
        return producer.inputs[0]
    if is_op(producer, "Pow") and view.scalar(producer.inputs[1]) == 2.0:
        return producer.inputs[0]
    return None


def denominator(view: GraphView, value: ir.Value | None) -> tuple[str, ir.Value, float] | None:
    """What ``value`` is the norm of: (kind, x, epsilon)."""
    value = through(uncast(value), "Expand", "Cast", "Identity")
    producer = None if value is None else value.producer()
    if producer is None:
        return None
    if is_op(producer, "Sqrt") or (is_op(producer, "Pow") and view.scalar(producer.inputs[1]) == 0.5):
        return _root(view, producer.inputs[0])
    if is_op(producer, "Clip", "Max") and len(producer.inputs) >= 2:
        return _clamped(view, producer)
    return None


def _root(view: GraphView, value: ir.Value | None) -> tuple[str, ir.Value, float] | None:
    """The radicand: reduced squares plus epsilon."""
    epsilon = 0.0
    producer = None if value is None else value.producer()
    if is_op(producer, "Add") and producer is not None:
        a, b = producer.inputs[0], producer.inputs[1]
        scalar = view.scalar(b)
        if scalar is None:
            scalar, a = view.scalar(a), b
        if scalar is None:
            return None
        epsilon, value = scalar, a
    value = uncast(value)
    producer = None if value is None else value.producer()
    if producer is None:
        return None
    if is_op(producer, "ReduceSumSquare"):
        x = producer.inputs[0]
        kind = "sum"
    elif is_op(producer, "ReduceSum", "ReduceMean"):
        x = square_of(view, producer.inputs[0])
        kind = "sum" if producer.op_type == "ReduceSum" else "rms"
    else:
        return None
    if x is None or not _last_axis(view, producer, x):
        return None
    return kind, x, epsilon


def _clamped(view: GraphView, node: ir.Node) -> tuple[str, ir.Value, float] | None:
    """max(norm, eps), as F.normalize leaves it: `ReduceL2 Clip` or `... Max`."""
    norm, bound = node.inputs[0], node.inputs[1]
    if node.op_type == "Clip":
        if len(node.inputs) > 2 and node.inputs[2] is not None and (view.scalar(node.inputs[2]) or 0.0) < 1e30:
            return None
    elif view.scalar(norm) is not None:
        norm, bound = bound, norm
    epsilon = view.scalar(bound)
    norm = uncast(norm)
    producer = None if norm is None else norm.producer()
    if epsilon is None or producer is None:
        return None
    if is_op(producer, "ReduceL2"):
        x = producer.inputs[0]
        return ("max", x, epsilon) if x is not None and _last_axis(view, producer, x) else None
    if is_op(producer, "Sqrt"):
        inner = _root(view, producer.inputs[0])
        if inner is not None and inner[0] == "sum" and inner[2] == 0.0:
            return "max", inner[1], epsilon
    return None


def match_norm(view: GraphView, node: ir.Node) -> Norm | None:
    """``x / norm`` or ``x * reciprocal(norm)`` (or ``norm^-0.5``), with this node last; casts in between are seen through."""
    y = node.outputs[0]
    if is_op(node, "LpNormalization"):
        x, rank = node.inputs[0], rank_of(y)
        axis = attribute_int(node, "axis", -1)
        if x is None or attribute_int(node, "p", 2) != 2 or axis not in (-1, (rank or 0) - 1):
            return None
        return Norm("sum", x, y, 0.0)
    if is_op(node, "Div"):
        x, below = node.inputs[0], node.inputs[1]
        found = denominator(view, below)
        if found is not None and same(found[1], x) and x is not None:
            return Norm(found[0], x, y, found[2])
        return None
    if not is_op(node, "Mul"):
        return None
    for x, factor in ((node.inputs[0], node.inputs[1]), (node.inputs[1], node.inputs[0])):
        found = reciprocal_norm(view, factor)
        if found is not None and same(found[1], x) and x is not None:
            return Norm(found[0], x, y, found[2])
    return None


def reciprocal_norm(view: GraphView, value: ir.Value | None) -> tuple[str, ir.Value, float] | None:
    """(kind, x, epsilon) when the value is 1 / norm(x)."""
    value = through(value, "Expand", "Cast", "Identity")
    producer = None if value is None else value.producer()
    if producer is None:
        return None
    if is_op(producer, "Reciprocal"):
        return denominator(view, producer.inputs[0])
    if is_op(producer, "Div") and view.scalar(producer.inputs[0]) == 1.0:
        return denominator(view, producer.inputs[1])
    if is_op(producer, "Pow") and view.scalar(producer.inputs[1]) == -0.5:
        return _root(view, producer.inputs[0])
    return None


def match_silu(view: GraphView, node: ir.Node) -> ir.Value | None:
    """x, when this node gives x * sigmoid(x): `Sigmoid Mul`, `Swish`, ORT's `QuickGelu` with alpha 1."""
    if is_op(node, "Swish"):
        return node.inputs[0] if attribute_float(node, "alpha", 1.0) == 1.0 else None
    if node.domain == "com.microsoft" and node.op_type == "QuickGelu":
        return node.inputs[0] if attribute_float(node, "alpha", 1.702) == 1.0 else None
    if not is_op(node, "Mul"):
        return None
    for x, factor in ((node.inputs[0], node.inputs[1]), (node.inputs[1], node.inputs[0])):
        producer = None if factor is None else uncast(factor).producer()  # type: ignore[union-attr]
        if is_op(producer, "Sigmoid") and producer is not None and same(producer.inputs[0], x):
            return x
    return None


def match_softplus(view: GraphView, node: ir.Node) -> ir.Value | None:
    """x, when this node gives log(1 + exp(x)), with or without the linear branch above a threshold."""
    if is_op(node, "Softplus"):
        return node.inputs[0]
    if is_op(node, "Log"):
        inner = node.inputs[0]
        add = None if inner is None else inner.producer()
        if not is_op(add, "Add") or add is None:
            return None
        for one, exp in ((add.inputs[0], add.inputs[1]), (add.inputs[1], add.inputs[0])):
            producer = None if exp is None else exp.producer()
            if view.scalar(one) == 1.0 and is_op(producer, "Exp") and producer is not None:
                return producer.inputs[0]
        return None
    if is_op(node, "Where"):
        condition, linear, curved = node.inputs
        compare = None if condition is None else condition.producer()
        producer = None if curved is None else uncast(curved).producer()  # type: ignore[union-attr]
        if compare is None or producer is None or not is_op(compare, "Greater", "GreaterOrEqual"):
            return None
        # above 14 the branches agree to float32
        threshold = view.scalar(compare.inputs[1])
        x = match_softplus(view, producer)
        if x is not None and threshold is not None and threshold >= 14 and same(compare.inputs[0], x) and same(linear, x):
            return x
    return None
