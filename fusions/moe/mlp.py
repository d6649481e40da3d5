"""One expert, from its result back: down projection, activation and clamp, gate and up projections."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from ..graph import attribute_float, attribute_int, attribute_string, is_op, rank_of, static_dims
from ..match import same
from .linear import Linear, read_linear
from .reader import Reader
from .stored import slice_of


@dataclass(frozen=True)
class Half:
    """Rows of a linear layer's result: all, or those that a split, a slice or an interleaving picks."""

    linear: Linear
    rows: tuple[int, ...]


@dataclass(frozen=True)
class Mlp:
    """``down (act(gate x) * (up x + offset))``, or ``down act(gate x)`` without ``up``.

    ``factors`` are further factors of the product before the down projection (an expert's weight, say).
    """

    down: Linear
    gate: Half
    up: Half | None
    activation: str
    clamp: str
    gate_limit: float
    up_limit: float
    factors: tuple[ir.Value, ...] = ()
    alpha: float = 1.0
    offset: float = 0.0

    @property
    def x(self) -> ir.Value:
        return self.gate.linear.x

    def settings(self) -> tuple[object, ...]:
        """What all experts of a block must share."""
        return (
            self.activation,
            self.alpha,
            self.offset,
            self.clamp,
            self.gate_limit,
            self.up_limit,
            self.up is None,
        )


@dataclass(frozen=True)
class _Act:
    kind: str
    x: ir.Value
    after: float = math.inf
    alpha: float = 1.0  # silu is x sigmoid(alpha x)


def read_mlp(
    r: Reader, value: ir.Value | None, linear: Callable[[Reader, ir.Value | None], Linear | None] = read_linear
) -> Mlp | None:
    """The expert that ends in ``value``. ``linear`` reads its projections."""
    down = linear(r, r.moved(value))
    if down is None:
        return None
    hidden = r.moved(down.x)
    found = r.attempt(_gated, hidden, down, linear) or r.attempt(_plain, hidden, down, linear)
    if found is not None and found.factors and down.bias is not None:
        r.refuse("a factor before a down projection that has a bias")
        return None
    return found


def _plain(r: Reader, hidden: ir.Value | None, down: Linear, linear: Callable[..., Linear | None]) -> Mlp | None:
    act = _activation(r, hidden)
    if act is None or act.after != math.inf:
        return None
    gate = _half(r, act.x, linear)
    if gate is None or len(gate.rows) != gate.linear.width:
        return None
    return Mlp(down, gate, None, act.kind, "none", math.inf, math.inf, alpha=act.alpha)


def _gated(r: Reader, hidden: ir.Value | None, down: Linear, linear: Callable[..., Linear | None]) -> Mlp | None:
    node = r.node(hidden, "Mul")
    if node is None:
        return None
    for one, other in ((0, 1), (1, 0)):
        found = r.attempt(_pair, node.inputs[one], node.inputs[other], down, linear)
        if found is not None:
            return found
    # a product of more factors: an activation written out, or an expert's weight among them
    factors = r.factors(hidden)
    for i, factor in enumerate(factors):
        rest = factors[:i] + factors[i + 1 :]
        act = r.attempt(_activation, factor)
        if act is not None:
            for j, up in enumerate(rest):
                found = r.attempt(_from, act, up, down, linear, tuple(rest[:j] + rest[j + 1 :]))
                if found is not None:
                    return found
        sigmoid = r.node(factor, "Sigmoid")
        if sigmoid is None:
            continue
        twins = [(f, alpha) for f in rest if (alpha := _slope(r, sigmoid.inputs[0], f)) is not None]
        if twins:
            left = [f for f in rest if f is not twins[0][0]]
            for j, up in enumerate(left):
                silu = _Act("silu", twins[0][0], alpha=twins[0][1])
                found = r.attempt(_from, silu, up, down, linear, tuple(left[:j] + left[j + 1 :]))
                if found is not None:
                    return found
    return None


def _pair(
    r: Reader, a: ir.Value | None, b: ir.Value | None, down: Linear, linear: Callable[..., Linear | None]
) -> Mlp | None:
    act = _activation(r, r.moved(a))
    return None if act is None or b is None else _from(r, act, b, down, linear, ())


def _from(
    r: Reader,
    act: _Act,
    up_value: ir.Value,
    down: Linear,
    linear: Callable[..., Linear | None],
    factors: tuple[ir.Value, ...],
) -> Mlp | None:
    offset, up_base = _offset(r, r.moved(up_value))
    up_x, up_low, up_high = r.bounded(up_base)
    gate_x, gate_low, gate_high = r.bounded(r.moved(act.x))
    if up_x is None or gate_x is None or gate_low != -math.inf or up_low != -up_high:
        r.refuse("a clamp of the experts that is neither one-sided on the gate nor symmetric on the up projection")
        return None
    if gate_high != math.inf and act.after != math.inf:
        return None
    clamp = "none"
    if act.after != math.inf:
        clamp = "after"
    elif gate_high != math.inf or up_high != math.inf:
        clamp = "before"
    gate, up = _half(r, gate_x, linear), _half(r, up_x, linear)
    if gate is None or up is None:
        return None
    if (gate.linear.bias is None) != (up.linear.bias is None):
        r.refuse("of gate and up projection one has a bias")
        return None
    if len(gate.rows) != len(up.rows):
        return None
    limit = act.after if clamp == "after" else gate_high
    return Mlp(down, gate, up, act.kind, clamp, limit, up_high, factors, act.alpha, offset)


def _offset(r: Reader, value: ir.Value | None) -> tuple[float, ir.Value | None]:
    """A number that is added, and what it is added to."""
    add = r.attempt(_added_number, value)
    return (0.0, value) if add is None else add


def _added_number(r: Reader, value: ir.Value | None) -> tuple[float, ir.Value | None] | None:
    add = r.node(value, "Add")
    if add is None:
        return None
    for number, other in (add.inputs, add.inputs[::-1]):
        scalar = r.scalar(number)
        if scalar is not None:
            return scalar, r.moved(other)
    return None


def _slope(r: Reader, value: ir.Value | None, x: ir.Value) -> float | None:
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


# --- activations ----------------------------------------------------------------------------------------------------


#: Activations that experts may have and the op has not.
_OTHERS = ("Celu", "Elu", "HardSigmoid", "HardSwish", "LeakyRelu", "Mish", "PRelu", "Relu", "Selu", "Softplus", "Tanh")


def _activation(r: Reader, value: ir.Value | None) -> _Act | None:
    """An activation of something, bounded from above afterwards or not."""
    inner, low, high = r.bounded(value)
    if inner is None or low != -math.inf:
        # relu written as a bound from below
        return None
    for reading in (_silu, _gelu_op, _relu2, _gelu_written):
        found = r.attempt(reading, inner)
        if found is not None:
            return _Act(found.kind, found.x, high, found.alpha)
    producer = inner.producer()
    if is_op(producer, *_OTHERS) and producer is not None:
        r.refuse(f"experts' activation is {producer.op_type}, which the op has not")
    return None


def _silu(r: Reader, value: ir.Value) -> _Act | None:
    producer = value.producer()
    if is_op(producer, "Swish") and producer is not None:
        r.marks.add(producer)
        assert producer.inputs[0] is not None
        return _Act("silu", producer.inputs[0], alpha=attribute_float(producer, "alpha", 1.0))
    if producer is not None and producer.domain == "com.microsoft" and producer.op_type == "QuickGelu":
        if producer.inputs[0] is None:
            return None
        r.marks.add(producer)
        return _Act("silu", producer.inputs[0], alpha=attribute_float(producer, "alpha", 1.702))
    node = r.node(value, "Mul")
    if node is None:
        return None
    for one, other in ((0, 1), (1, 0)):
        sigmoid = r.node(r.moved(node.inputs[one]), "Sigmoid")
        x = node.inputs[other]
        alpha = None if sigmoid is None or x is None else _slope(r, sigmoid.inputs[0], x)
        if sigmoid is not None and x is not None and alpha is not None:
            r.moved(sigmoid.inputs[0])
            return _Act("silu", x, alpha=alpha)
    return None


def _gelu_op(r: Reader, value: ir.Value) -> _Act | None:
    producer = value.producer()
    if producer is None or producer.op_type != "Gelu" or producer.domain not in ("", "ai.onnx", "com.microsoft"):
        return None
    assert producer.inputs[0] is not None
    r.marks.add(producer)
    tanh = attribute_string(producer, "approximate", "none") == "tanh"
    return _Act("gelu_tanh" if tanh else "gelu", producer.inputs[0])


def _relu2(r: Reader, value: ir.Value) -> _Act | None:
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
        return None if relu.inputs[0] is None else _Act("relu2", relu.inputs[0])
    x, low, high = r.bounded(node.inputs[0])
    return _Act("relu2", x) if x is not None and (low, high) == (0.0, math.inf) else None


def _gelu_written(r: Reader, value: ir.Value) -> _Act | None:
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
            return _Act("gelu", x)
        if node.op_type == "Tanh" and _cubic(r, node.inputs[0], x):
            return _Act("gelu_tanh", x)
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


# --- halves ---------------------------------------------------------------------------------------------------------


def _half(r: Reader, value: ir.Value, linear: Callable[..., Linear | None]) -> Half | None:
    """Which rows of which linear layer a value is."""
    path: list[tuple[ir.Node, int]] = []
    current: ir.Value | None = value
    while current is not None:
        found = r.attempt(linear, current)
        if found is not None:
            rows = _rows(r, found, path[::-1])
            return None if rows is None else Half(found, rows)
        node = r.node(
            current, "Split", "Slice", "Gather", "Reshape", "Squeeze", "Unsqueeze", "Transpose", "Cast", "Identity"
        )
        if node is None:
            return None
        path.append((node, list(node.outputs).index(current)))
        current = node.inputs[0]
    return None


def _rows(r: Reader, linear: Linear, path: list[tuple[ir.Node, int]]) -> tuple[int, ...] | None:
    """Follow the numbers of the rows through data-moving nodes; all other axes count as one long."""
    rank = rank_of(linear.y)
    if rank is None:
        return tuple(range(linear.width)) if not path else None
    numbers = np.arange(linear.width).reshape([-1 if i == rank + linear.rows else 1 for i in range(rank)])
    for node, place in path:
        moved = _move(r, numbers, node, place)
        if moved is None:
            return None
        numbers = moved
    return tuple(int(i) for i in numbers.reshape(-1))


def _move(r: Reader, numbers: np.ndarray, node: ir.Node, place: int) -> np.ndarray | None:
    kind = node.op_type
    if kind in ("Cast", "Identity"):
        return numbers
    if kind == "Transpose":
        order = [int(i) for i in node.attributes["perm"].as_ints()] if "perm" in node.attributes else None
        return np.transpose(numbers, order)
    if kind == "Split":
        axis = attribute_int(node, "axis", 0) % numbers.ndim
        sizes = r.view.ints(node.inputs[1]) if len(node.inputs) > 1 and node.inputs[1] is not None else None
        parts = np.array_split(numbers, len(node.outputs) if sizes is None else np.cumsum(sizes)[:-1], axis=axis)
        return parts[place]
    if kind == "Slice":
        found = slice_of(r.view, node, numbers.shape)
        return None if found is None else np.take(numbers, found[1], axis=found[0])
    if kind == "Gather":
        index = r.view.array(node.inputs[1])
        return None if index is None else np.take(numbers, index, axis=attribute_int(node, "axis", 0))
    if kind in ("Squeeze", "Unsqueeze"):
        axes = r.axes(node)
        if kind == "Unsqueeze":
            return None if axes is None else np.expand_dims(numbers, tuple(axes))
        try:
            return np.squeeze(numbers, None if axes is None else tuple(axes))
        except ValueError:
            return None
    dims = static_dims(node.outputs[0])
    if dims is None:
        return None
    # the last axes hold the channels, the others count as one long
    lead, tail = list(dims), list[int]()
    while lead and int(np.prod(tail)) < numbers.size:
        last = lead.pop()
        if last is None:
            return None
        tail.insert(0, last)
    return numbers.reshape([*[1] * len(lead), *tail]) if int(np.prod(tail)) == numbers.size else None
