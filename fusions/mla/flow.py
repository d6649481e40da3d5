"""Where queries and keys come from: back through moves, rotations, scales and joins with a cache."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from math import isfinite

import onnx_ir as ir

from ..cleanup.rms_norm import rms_norm_of
from ..graph import FLOAT_TYPES, GraphView, attribute_int, attribute_string, is_op, rank_of, static_dims
from ..match import uncast
from .joins import Join, join_of, write_of

_MOVES = frozenset("Cast Expand Flatten Identity Neg Reshape Slice Split Squeeze Tile Transpose Unsqueeze".split())


@dataclass
class Flow:
    """What a value is made of.

    Attributes:
        leaves: where the walk ended, and the scalar factors on the shortest way there.
        factors: values that something on the way is multiplied with, such as cosines: the root of each, and where.
        joins: caches on the way, the nearest to the start first.
        weights: constant matrices for each head on the way (absorbed weights).
        nodes: all nodes on the way.
        rotated: the nodes that multiply with factors.
        lost: a node that the walk does not understand.
    """

    leaves: dict[ir.Value, float] = field(default_factory=dict)
    factors: dict[ir.Value, ir.Node] = field(default_factory=dict)
    joins: list[Join] = field(default_factory=list)
    weights: list[tuple[ir.Node, ir.Value]] = field(default_factory=list)
    nodes: dict[ir.Node, None] = field(default_factory=dict)
    lost: ir.Node | None = None


def is_leaf(view: GraphView, value: ir.Value) -> bool:
    """Linear layers' results, graph inputs, and what is cut out of either along the channels."""
    producer = value.producer()
    if producer is None or view.is_linear(producer) or view.is_opaque(producer):
        return True
    if is_op(producer, "Cast"):  # ORT's CPU computes 16 bits in float32 between casts
        source = producer.inputs[0]
        return source is not None and source.dtype in FLOAT_TYPES and is_layer(view, source)
    if is_op(producer, "Add") and any(v is not None and view.is_const(v) for v in producer.inputs):
        return any(v is not None and (p := v.producer()) is not None and view.is_linear(p) for v in producer.inputs)
    return False


def is_layer(view: GraphView, value: ir.Value) -> bool:
    """A linear layer's result, with or without its bias."""
    producer = value.producer()
    return producer is not None and not is_op(producer, "Cast") and is_leaf(view, value)


def _is_part(view: GraphView, node: ir.Node) -> bool:
    """A cut of a linear layer's result along its channels, or its rows brought to batch and tokens."""
    source = node.inputs[0] if node.inputs else None
    if source is None:
        return False
    before = source.producer()
    if not is_leaf(view, source) and (before is None or not is_op(before, "Split") or not _is_part(view, before)):
        return False
    rank = rank_of(source)
    if is_op(node, "Split") and rank == 3:
        return attribute_int(node, "axis", 0) % 3 == 2
    if is_op(node, "Slice") and rank == 3 and len(node.inputs) > 3:
        steps = view.ints(node.inputs[4]) if len(node.inputs) > 4 and node.inputs[4] is not None else [1]
        axes = view.ints(node.inputs[3])
        return axes is not None and [a % 3 for a in axes] == [2] and steps == [1]
    return is_op(node, "Reshape") and rank == 2 and (rank_of(node.outputs[0]) or 0) >= 3


def walk(view: GraphView, start: ir.Value) -> Flow:
    """Walk back from a value to its leaves."""
    found = Flow()
    queue: deque[tuple[ir.Value, float]] = deque([(start, 1.0)])
    seen: set[ir.Value] = {start}

    def visit(value: ir.Value | None, scale: float) -> None:
        if value is not None and value not in seen and not view.is_const(value):
            seen.add(value)
            queue.append((value, scale))

    while queue:
        value, scale = queue.popleft()
        producer = value.producer()
        if producer is None or is_leaf(view, value) or _is_part(view, producer):
            found.leaves.setdefault(value, scale)
            continue
        if is_normed(view, value):
            found.leaves.setdefault(value, scale)
            continue
        found.nodes[producer] = None
        cut = cut_of(view, value)
        if cut is not None:
            found.joins.append(cut[0])
            visit(cut[1], scale)
        elif is_op(producer, *_MOVES) or is_op(producer, "Gather") or widens(view, producer):
            visit(producer.inputs[0], scale)
        elif is_op(producer, "Concat"):
            join = join_of(view, producer)
            if join is not None:
                found.joins.append(join)
                visit(join.new, scale)
            else:
                for part in producer.inputs:
                    visit(part, scale)
        elif is_op(producer, "ScatterND", "ScatterElements", "Where"):
            join = write_of(view, producer)
            if join is not None:
                found.joins.append(join)
                visit(join.new, scale)
            elif is_op(producer, "Where"):
                found.lost = found.lost or producer
                found.leaves.setdefault(value, scale)
            else:
                visit(producer.inputs[0], scale)
                visit(producer.inputs[2], scale)
        elif is_op(producer, "ConstantOfShape"):
            continue
        elif is_op(producer, "Add", "Sub"):
            for part in producer.inputs:
                visit(part, scale)
        elif is_op(producer, "Mul", "Div"):
            for part, factor in _product(view, producer, found):
                visit(part, scale * factor)
        elif is_op(producer, "MatMul", "Einsum") and len(producer.inputs) == 2:
            a, b = producer.inputs
            constant = next((v for v in (b, a) if v is not None and view.is_const(v)), None)
            if constant is None:
                found.lost = found.lost or producer
                found.leaves.setdefault(value, scale)
                continue
            found.weights.append((producer, constant))
            visit(a if constant is b else b, scale)
        else:
            found.lost = found.lost or producer
            found.leaves.setdefault(value, scale)
    _whole(found)
    return found


def is_normed(view: GraphView, value: ir.Value) -> bool:
    """The result of a root mean square norm, with or without its weight."""
    if rms_norm_of(value) is not None:
        return True
    node, width = value.producer(), channels_of(value)
    if not is_op(node, "Mul") or node is None or width is None:
        return False
    for data, weight in (node.inputs, node.inputs[::-1]):
        normed = rms_norm_of(uncast(data) or data) if data is not None else None
        if normed is not None and weight is not None and view.is_const(weight):
            dims = static_dims(weight)
            return dims is not None and dims[-1:] == [width] and all(d == 1 for d in dims[:-1])
    return False


def widens(view: GraphView, node: ir.Node) -> bool:
    """Does a Pad put zeros behind the channels? Attention kernels that want values as wide as keys are given those."""
    if not is_op(node, "Pad") or attribute_string(node, "mode", "constant") != "constant":
        return False
    _, pads, filled, axes = [*node.inputs, None, None, None][:4]
    counts, rank = view.ints(pads), rank_of(node.outputs[0])
    if not counts or rank is None or counts[-1] < 0 or (filled is not None and view.scalar(filled) != 0.0):
        return False
    if axes is not None:
        return [a % rank for a in view.ints(axes) or [0]] == [rank - 1] and counts[0] == 0
    return not any(counts[:-1]) and len(counts) == 2 * rank


def joined(flows: list[Flow]) -> Flow:
    """Several walks as one."""
    if len(flows) == 1:
        return flows[0]
    found = Flow()
    for flow in flows:
        found.leaves |= flow.leaves
        found.factors |= flow.factors
        found.joins += [j for j in flow.joins if j not in found.joins]
        found.weights += flow.weights
        found.nodes |= flow.nodes
        found.lost = found.lost or flow.lost
    return found


def _whole(found: Flow) -> None:
    """A part of a leaf, such as half of a rotary key, is no leaf beside it."""
    for leaf in list(found.leaves):
        producer = leaf.producer()
        if producer is not None and is_op(producer, "Slice", "Split") and producer.inputs[0] in found.leaves:
            del found.leaves[leaf]
            found.nodes[producer] = None


def _product(view: GraphView, node: ir.Node, found: Flow) -> list[tuple[ir.Value, float]]:
    """The data of a product, with its scalar factor; what it is multiplied with goes to ``found.factors``."""
    a, b = node.inputs
    if a is None or b is None:
        return []
    for data, other in ((a, b), (b, a)):
        scalar = view.scalar(other)
        if scalar and isfinite(scalar):
            if is_op(node, "Div"):
                return [(data, 1.0 / scalar)] if other is b else []
            return [(data, scalar)]
        if is_op(node, "Div"):
            break
    if is_op(node, "Div"):
        found.factors[root_of(view, b)] = node
        return [(a, 1.0)]
    data, factor = _sides(view, node, a, b)
    found.factors[root_of(view, factor)] = node
    return [(data, 1.0)]


def _sides(view: GraphView, node: ir.Node, a: ir.Value, b: ir.Value) -> tuple[ir.Value, ir.Value]:
    """(data, factor): the factor is broadcast to the data, or does not come from a linear layer."""
    if view.is_const(a) or view.is_const(b):
        return (b, a) if view.is_const(a) else (a, b)
    ones_a, ones_b = _ones(a), _ones(b)
    if ones_a != ones_b:
        return (a, b) if ones_a < ones_b else (b, a)
    return (a, b) if _from_linear(view, a) or not _from_linear(view, b) else (b, a)


def _ones(value: ir.Value) -> int:
    """How many axes it is broadcast along, of four."""
    dims = static_dims(value)
    return 4 if dims is None else 4 - len(dims) + sum(d == 1 for d in dims)


def _from_linear(view: GraphView, value: ir.Value) -> bool:
    """Comes it out of a linear layer, by moves and products?"""
    stack, seen = [value], {value}
    while stack and len(seen) < 64:
        current = stack.pop()
        producer = current.producer()
        if producer is None:
            continue
        if view.is_linear(producer):
            return True
        for part in producer.inputs:
            if part is not None and part not in seen and not view.is_const(part) and not view.is_integer(part):
                seen.add(part)
                stack.append(part)
    return False


def root_of(view: GraphView, value: ir.Value) -> ir.Value:
    """The value before axes of size one came and it was cast."""
    while True:
        producer = value.producer()
        if producer is None or producer.inputs[0] is None or view.is_const(value):
            return value
        source = producer.inputs[0]
        if is_op(producer, "Unsqueeze", "Squeeze", "Identity"):
            value = source
        elif is_op(producer, "Cast") and source.dtype in (
            ir.DataType.FLOAT,
            ir.DataType.FLOAT16,
            ir.DataType.BFLOAT16,
        ):
            value = source
        elif is_op(producer, "Reshape") and _same_but_ones(source, value):
            value = source
        else:
            return value


def _same_but_ones(a: ir.Value, b: ir.Value) -> bool:
    if a.shape is None or b.shape is None:
        return False
    left, right = ([d for d in v.shape if d != 1] for v in (a, b))  # type: ignore[union-attr]
    return left == right


def cut_of(view: GraphView, value: ir.Value) -> tuple[Join, ir.Value] | None:
    """A cut along the channels of a packed cache: the cache's join and the same channels of what is new."""
    node = value.producer()
    if node is None or not is_op(node, "Split", "Slice") or node.inputs[0] is None:
        return None
    whole = node.inputs[0]
    producer, rank = whole.producer(), rank_of(whole)
    join = join_of(view, producer) if is_op(producer, "Concat") and producer is not None else None
    limits = channels_cut(view, node, value, rank)
    if join is None or limits is None:
        return None
    parts = unmoved(view, join.new).producer()
    if not is_op(parts, "Concat") or parts is None:
        return None
    start = 0
    for part in parts.inputs:
        width = None if part is None else channels_of(part)
        if part is None or width is None:
            return None
        if (start, start + width) == limits:
            return join, part
        start += width
    return None


def channels_cut(view: GraphView, node: ir.Node, value: ir.Value, rank: int | None) -> tuple[int, int] | None:
    """The range of channels that a Split or Slice takes."""
    if rank is None:
        return None
    if is_op(node, "Split"):
        if attribute_int(node, "axis", 0) % rank != rank - 1:
            return None
        start = 0
        for output in node.outputs:
            width = channels_of(output)
            if width is None:
                return None
            if output is value:
                return start, start + width
            start += width
        return None
    axes = view.ints(node.inputs[3]) if len(node.inputs) > 3 else None
    steps = view.ints(node.inputs[4]) if len(node.inputs) > 4 and node.inputs[4] is not None else [1]
    starts, width = view.ints(node.inputs[1]), channels_of(value)
    if axes is None or [a % rank for a in axes] != [rank - 1] or steps != [1] or starts is None or width is None:
        return None
    whole = None if node.inputs[0] is None else channels_of(node.inputs[0])
    start = starts[0] if starts[0] >= 0 or whole is None else starts[0] + whole
    return start, start + width


def unmoved(view: GraphView, value: ir.Value) -> ir.Value:
    """The value before moves that keep every element in its order: reshapes, casts, axes of size one."""
    while (producer := value.producer()) is not None and not view.is_const(value):
        source = producer.inputs[0] if producer.inputs else None
        if source is None or is_leaf(view, value):
            return value
        if is_op(producer, "Reshape", "Cast", "Identity", "Squeeze", "Unsqueeze", "Flatten"):
            value = source
        elif is_op(producer, "Transpose") and _moves_ones(producer):
            value = source
        else:
            return value
    return value


def _moves_ones(node: ir.Node) -> bool:
    """Does a transpose move axes of size one only?"""
    source = node.inputs[0]
    dims = None if source is None else static_dims(source)
    perm = node.attributes["perm"].as_ints() if "perm" in node.attributes else None
    if dims is None or perm is None:
        return False
    kept = [p for p in perm if dims[p] != 1]
    return kept == sorted(kept)


def channels_of(value: ir.Value) -> int | None:
    """The last dim, where it is known."""
    dims = static_dims(value)
    return dims[-1] if dims else None


def row_width(value: ir.Value) -> int | None:
    """The last dim, or that in front of it where it is one: parts of complex numbers keep such an axis."""
    dims = static_dims(value)
    if not dims:
        return None
    return dims[-2] if len(dims) > 2 and dims[-1] == 1 else dims[-1]
