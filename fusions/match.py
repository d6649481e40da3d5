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


def unmoved(value: ir.Value | None) -> ir.Value | None:
    """The value before casts and transposes: ORT's optimiser moves transposes into the middle of norms."""
    return through(value, "Cast", "Identity", "Transpose")


def same_elements(a: ir.Value | None, b: ir.Value | None) -> bool:
    """The same value, casts and transposes aside."""
    return a is not None and (a is b or unmoved(a) is unmoved(b))


@dataclass(frozen=True)
class Norm:
    """``y = numerator / norm(x)`` over one axis of x. kind: "sum" sqrt(sum x^2 + eps), "max" max(sqrt(sum x^2), eps),
    "rms" sqrt(mean x^2 + eps). ``numerator`` is x, or x transposed or cast."""

    kind: str
    x: ir.Value
    y: ir.Value
    epsilon: float
    numerator: ir.Value
    axis: int = -1


def _axis(view: GraphView, node: ir.Node) -> int | None:
    """The one axis that a reduction runs over and keeps, as the node has it (it may count from the end)."""
    if "keepdims" in node.attributes and node.attributes["keepdims"].as_int() != 1:
        return None
    if "axes" in node.attributes:
        axes: list[int] | None = list(node.attributes["axes"].as_ints())
    else:
        axes = view.ints(node.inputs[1]) if len(node.inputs) > 1 else None
    return axes[0] if axes is not None and len(axes) == 1 else None


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


@dataclass(frozen=True)
class Length:
    """A norm's denominator: of what, over which axis, and how epsilon enters (see :class:`Norm`)."""

    kind: str
    x: ir.Value
    epsilon: float
    axis: int


def denominator(view: GraphView, value: ir.Value | None) -> Length | None:
    """What ``value`` is the norm of."""
    value = through(value, "Expand", "Cast", "Identity", "Transpose")
    producer = None if value is None else value.producer()
    if producer is None:
        return None
    if is_op(producer, "Sqrt") or (is_op(producer, "Pow") and view.scalar(producer.inputs[1]) == 0.5):
        return radicand(view, producer.inputs[0])
    if is_op(producer, "Clip", "Max") and len(producer.inputs) >= 2:
        return _clamped(view, producer)
    return None


def radicand(view: GraphView, value: ir.Value | None) -> Length | None:
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
    value = unmoved(value)
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
    axis = _axis(view, producer)
    return None if x is None or axis is None else Length(kind, x, epsilon, axis)


def _clamped(view: GraphView, node: ir.Node) -> Length | None:
    """max(norm, eps), as F.normalize leaves it: `ReduceL2 Clip` or `... Max`."""
    norm, bound = node.inputs[0], node.inputs[1]
    if node.op_type == "Clip":
        if len(node.inputs) > 2 and node.inputs[2] is not None and (view.scalar(node.inputs[2]) or 0.0) < 1e30:
            return None
    elif view.scalar(norm) is not None:
        norm, bound = bound, norm
    epsilon = view.scalar(bound)
    norm = unmoved(norm)
    producer = None if norm is None else norm.producer()
    if epsilon is None or producer is None:
        return None
    if is_op(producer, "ReduceL2"):
        x, axis = producer.inputs[0], _axis(view, producer)
        return None if x is None or axis is None else Length("max", x, epsilon, axis)
    if is_op(producer, "Sqrt"):
        inner = radicand(view, producer.inputs[0])
        if inner is not None and inner.kind == "sum" and inner.epsilon == 0.0:
            return Length("max", inner.x, epsilon, inner.axis)
    return None


def match_norm(view: GraphView, node: ir.Node) -> Norm | None:
    """``x / norm`` or ``x * reciprocal(norm)``, with this node last; casts and transposes are seen through."""
    y = node.outputs[0]
    if is_op(node, "LpNormalization"):
        x, rank = node.inputs[0], rank_of(y)
        axis = attribute_int(node, "axis", -1)
        if x is None or attribute_int(node, "p", 2) != 2 or axis not in (-1, (rank or 0) - 1):
            return None
        return Norm("sum", x, y, 0.0, x)
    if is_op(node, "Div"):
        x, below = node.inputs[0], node.inputs[1]
        found = denominator(view, below)
        if found is not None and same_elements(found.x, x) and x is not None:
            return Norm(found.kind, found.x, y, found.epsilon, x, found.axis)
        return None
    if not is_op(node, "Mul"):
        return None
    for x, factor in ((node.inputs[0], node.inputs[1]), (node.inputs[1], node.inputs[0])):
        found = reciprocal_norm(view, factor)
        if found is not None and same_elements(found.x, x) and x is not None:
            return Norm(found.kind, found.x, y, found.epsilon, x, found.axis)
    return None


def reciprocal_norm(view: GraphView, value: ir.Value | None) -> Length | None:
    """The norm, when the value is 1 / norm(x)."""
    value = through(value, "Expand", "Cast", "Identity", "Transpose")
    producer = None if value is None else value.producer()
    if producer is None:
        return None
    if is_op(producer, "Reciprocal"):
        return denominator(view, producer.inputs[0])
    if is_op(producer, "Div") and view.scalar(producer.inputs[0]) == 1.0:
        return denominator(view, producer.inputs[1])
    if is_op(producer, "Pow") and view.scalar(producer.inputs[1]) == -0.5:
        return radicand(view, producer.inputs[0])
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
        if (
            x is not None
            and threshold is not None
            and threshold >= 14
            and same(compare.inputs[0], x)
            and same(linear, x)
        ):
            return x
    return None
