"""One expert, from its result back: down projection, activation and clamp, gate and up projections."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from ..graph import attribute_int, rank_of, static_dims
from .activations import Act, read_activation, read_slope
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
    act = read_activation(r, hidden)
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
        act = r.attempt(read_activation, factor)
        if act is not None:
            for j, up in enumerate(rest):
                found = r.attempt(_from, act, up, down, linear, tuple(rest[:j] + rest[j + 1 :]))
                if found is not None:
                    return found
        sigmoid = r.node(factor, "Sigmoid")
        if sigmoid is None:
            continue
        twins = [(f, alpha) for f in rest if (alpha := read_slope(r, sigmoid.inputs[0], f)) is not None]
        if twins:
            left = [f for f in rest if f is not twins[0][0]]
            for j, up in enumerate(left):
                silu = Act("silu", twins[0][0], alpha=twins[0][1])
                found = r.attempt(_from, silu, up, down, linear, tuple(left[:j] + left[j + 1 :]))
                if found is not None:
                    return found
    return None


def _pair(
    r: Reader, a: ir.Value | None, b: ir.Value | None, down: Linear, linear: Callable[..., Linear | None]
) -> Mlp | None:
    act = read_activation(r, r.moved(a))
    return None if act is None or b is None else _from(r, act, b, down, linear, ())


def _from(
    r: Reader,
    act: Act,
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
