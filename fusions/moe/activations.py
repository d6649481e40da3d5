"""Activations of experts, as operators or written out."""

from __future__ import annotations

import math
from dataclasses import dataclass

import onnx_ir as ir

from ..graph import attribute_float, attribute_string, is_op
from ..match import same
from .reader import Reader


@dataclass(frozen=True)
class Act:
    """An activation of ``x``, bounded from above by ``after``."""

    kind: str
    x: ir.Value
    after: float = math.inf
    alpha: float = 1.0  # silu is x sigmoid(alpha x)


def read_slope(r: Reader, value: ir.Value | None, x: ir.Value) -> float | None:
    """The number by which x is multiplied: 1 where the value is x."""
    if same(value, x):
        return 1.0
    product = r.node(r.moved(value), "Mul")
    if product is None:
        return None
    for number, other in (product.inputs, product.inputs[::-1]):
        scalar = r.scalar(number)
        if scalar is not None and same(other, x):
            return scalar
    return None


#: Activations that experts may have and the op has not.
_OTHERS = ("Celu", "Elu", "HardSigmoid", "HardSwish", "LeakyRelu", "Mish", "PRelu", "Relu", "Selu", "Softplus", "Tanh")


def read_activation(r: Reader, value: ir.Value | None) -> Act | None:
    """An activation of something, bounded from above afterwards or not."""
    inner, low, high = r.bounded(value)
    if inner is None or low != -math.inf:
        # relu written as a bound from below
        return None
    for reading in (_silu, _gelu_op, _relu2, _gelu_written):
        found = r.attempt(reading, inner)
        if found is not None:
            return Act(found.kind, found.x, high, found.alpha)
    producer = inner.producer()
    if is_op(producer, *_OTHERS) and producer is not None:
        r.refuse(f"experts' activation is {producer.op_type}, which the op has not")
    return None


def _silu(r: Reader, value: ir.Value) -> Act | None:
    producer = value.producer()
    if is_op(producer, "Swish") and producer is not None:
        r.marks.add(producer)
        assert producer.inputs[0] is not None
        return Act("silu", producer.inputs[0], alpha=attribute_float(producer, "alpha", 1.0))
    if producer is not None and producer.domain == "com.microsoft" and producer.op_type == "QuickGelu":
        if producer.inputs[0] is None:
            return None
        r.marks.add(producer)
        return Act("silu", producer.inputs[0], alpha=attribute_float(producer, "alpha", 1.702))
    node = r.node(value, "Mul")
    if node is None:
        return None
    for one, other in ((0, 1), (1, 0)):
        sigmoid = r.node(r.moved(node.inputs[one]), "Sigmoid")
        x = node.inputs[other]
        alpha = None if sigmoid is None or x is None else read_slope(r, sigmoid.inputs[0], x)
        if sigmoid is not None and x is not None and alpha is not None:
            r.moved(sigmoid.inputs[0])
            return Act("silu", x, alpha=alpha)
    return None


def _gelu_op(r: Reader, value: ir.Value) -> Act | None:
    producer = value.producer()
    if producer is None or producer.op_type != "Gelu" or producer.domain not in ("", "ai.onnx", "com.microsoft"):
        return None
    assert producer.inputs[0] is not None
    r.marks.add(producer)
    tanh = attribute_string(producer, "approximate", "none") == "tanh"
    return Act("gelu_tanh" if tanh else "gelu", producer.inputs[0])


def _relu2(r: Reader, value: ir.Value) -> Act | None:
    node = r.node(value, "Mul", "Pow")
    if node is None:
        return None
    if node.op_type == "Pow":
        if r.scalar(node.inputs[1]) != 2.0:
            return None
    elif node.inputs[0] is not node.inputs[1]:
        return None
    relu = r.node(node.inputs[0], "Relu")
    if relu is not None:
        return None if relu.inputs[0] is None else Act("relu2", relu.inputs[0])
    x, low, high = r.bounded(node.inputs[0])
    return Act("relu2", x) if x is not None and (low, high) == (0.0, math.inf) else None


def _gelu_written(r: Reader, value: ir.Value) -> Act | None:
    """``x/2 (1 + erf(x/sqrt 2))`` and ``x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))``."""
    constant, rest = 1.0, []
    for factor in r.factors(value):
        number = r.scalar(factor)
        if number is None:
            rest.append(factor)
        else:
            constant *= number
    if len(rest) != 2 or abs(constant - 0.5) > 1e-6:
        return None
    for x, curve in (rest, rest[::-1]):
        add = r.node(curve, "Add")
        if add is None:
            continue
        parts = [v for v in add.inputs if r.scalar(v) is None]
        if len(parts) != 1 or 1.0 not in [r.scalar(v) for v in add.inputs]:
            continue
        node = r.node(parts[0], "Erf", "Tanh")
        if node is None:
            continue
        if node.op_type == "Erf" and _multiple(r, node.inputs[0], x, 0.5**0.5):
            return Act("gelu", x)
        if node.op_type == "Tanh" and _cubic(r, node.inputs[0], x):
            return Act("gelu_tanh", x)
    return None


def _multiple(r: Reader, value: ir.Value | None, x: ir.Value, factor: float) -> bool:
    node = r.node(value, "Mul", "Div")
    if node is None:
        return False
    numbers = [r.scalar(v) for v in node.inputs]
    if node.op_type == "Div":
        number = None if numbers[1] is None else 1.0 / numbers[1]
        return node.inputs[0] is x and number is not None and abs(number - factor) < 1e-6
    number = next((n for n in numbers if n is not None), None)
    return x in list(node.inputs) and number is not None and abs(number - factor) < 1e-6


def _cubic(r: Reader, value: ir.Value | None, x: ir.Value) -> bool:
    outer = [f for f in r.factors(value) if r.scalar(f) is None]
    scale = math.prod(s for f in r.factors(value) if (s := r.scalar(f)) is not None)
    if len(outer) != 1 or abs(scale - math.sqrt(2.0 / math.pi)) > 1e-6:
        return False
    add = r.node(outer[0], "Add")
    if add is None or x not in list(add.inputs):
        return False
    other = add.inputs[1] if add.inputs[0] is x else add.inputs[0]
    cubed = [f for f in r.factors(other) if r.scalar(f) is None]
    number = math.prod(s for f in r.factors(other) if (s := r.scalar(f)) is not None)
    if abs(number - 0.044715) > 1e-6:
        return False
    if cubed == [x, x, x]:
        return True
    power = r.node(cubed[0], "Pow") if len(cubed) == 1 else None
    return power is not None and power.inputs[0] is x and r.scalar(power.inputs[1]) == 3.0
