"""The latent and the end of a block: norm, cache and packing before kv_b, gate and projection behind the attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from ...custom_ops.common.refusal import Refusal
from ..cleanup.rms_norm import rms_norm_of
from ..graph import GraphView, attribute_string, is_op, rank_of, static_dims
from ..match import uncast
from .core import Core
from .flow import channels_cut, cut_of, is_leaf, unmoved
from .joins import Join, join_of, write_of


@dataclass
class Latent:
    """The way to a kv_b layer's input.

    Attributes:
        raw: the new tokens' latent before its norm, or what stands where there is none.
        joins: the cache.
        weights, factor, epsilon: the norm that was taken in; ``epsilon`` None where none was.
        nodes: the norm's nodes.
        held: names of values that are the normed latent, of new tokens or of all: what a calibration may know it by.
    """

    raw: ir.Value
    joins: list[Join] = field(default_factory=list)
    weights: list[ir.Value] = field(default_factory=list)
    factor: float = 1.0
    epsilon: float | None = None
    nodes: set[ir.Node] = field(default_factory=set)
    held: list[str] = field(default_factory=list)

    def norm_weight(self, rank: int, arrays: Sequence[np.ndarray]) -> np.ndarray | None:
        """The norm's weight from the constants that make it."""
        product = np.full(rank, self.factor, np.float64)
        for array in arrays:
            if array.size not in (1, rank):
                return None
            product = product * array.astype(np.float64).reshape(-1)
        return product.astype(np.float32)


def latent_of(view: GraphView, value: ir.Value, rank: int) -> Latent:
    """Walk back from kv_b's input: moves, the cache, the norm."""
    joins: list[Join] = []
    held: list[str] = []
    while True:
        held.append(value.name or "")
        value = unmoved(view, value)
        held.append(value.name or "")
        producer = value.producer()
        if producer is None:
            break
        cut = cut_of(view, value)
        if cut is not None:
            joins.append(cut[0])
            value = cut[1]
            continue
        write = written(view, producer)
        if write is not None:
            joins.append(write)
            value = write.new
            continue
        join = join_of(view, producer) if is_op(producer, "Concat") else None
        if join is None:
            break
        joins.append(join)
        value = join.new
    plain = Latent(value, joins, held=held)
    found = Latent(value, joins, held=held)
    for _ in range(8):
        value = uncast(unmoved(view, value)) or value
        norm = rms_norm_of(value)
        producer = value.producer()
        if norm is not None:
            if norm.weight is not None:
                if not view.is_const(norm.weight):
                    return plain
                found.weights.append(norm.weight)
            found.raw, found.epsilon = uncast(norm.x) or norm.x, norm.epsilon
            found.nodes |= _between(view, found, joins[-1].new if joins else plain.raw)
            return found
        if not is_op(producer, "Mul") or producer is None:
            return plain
        a, b = producer.inputs
        for data, other in ((a, b), (b, a)):
            if data is not None and other is not None and view.is_const(other):
                scalar = view.scalar(other)
                if scalar is not None:
                    found.factor *= scalar
                else:
                    found.weights.append(other)
                value = data
                break
        else:
            return plain
    return plain


def written(view: GraphView, node: ir.Node) -> Join | None:
    """The cache of one size that a node gives: it is turned back, or its axes of size one need no turning."""
    if is_op(node, "ScatterND", "ScatterElements", "Where"):
        return write_of(view, node)
    inner = node.inputs[0].producer() if is_op(node, "Transpose") and node.inputs[0] is not None else None
    found = write_of(view, inner) if inner is not None and is_op(inner, "ScatterND") else None
    return found if found is not None and found.present is node.outputs[0] else None


def _between(view: GraphView, latent: Latent, end: ir.Value) -> set[ir.Node]:
    """The nodes from a latent to ``end``."""
    found: set[ir.Node] = set()
    stack = [end]
    while stack:
        value = stack.pop()
        producer = value.producer()
        if value is latent.raw or producer is None or producer in found or view.is_const(value):
            continue
        found.add(producer)
        stack += [v for v in producer.inputs if v is not None]
    return found


@dataclass
class End:
    """Where a block ends: ``x``, its axes from the attention's own, the gate on the way or why it is ``left``."""

    x: ir.Value
    layout: str  # "BSC", "BHSD", "BSHD", "NC" (rows)
    gate: ir.Value | None = None
    weights: list[tuple[ir.Node, ir.Value]] = field(default_factory=list)
    explained: set[ir.Node] = field(default_factory=set)
    left: Refusal | None = None
    width: int | None = None  # channels of a head that are kept, where values have zeros behind theirs


def ends_of(view: GraphView, core: Core) -> list[End]:
    """Ends of a block, the farthest first."""
    found: list[End] = []
    value, labels = core.o, _labels(core)
    end = End(value, _layout(labels, value))
    depends = {value}
    for _ in range(16):
        found.append(
            End(value, _layout(labels, value), end.gate, list(end.weights), set(end.explained), width=end.width)
        )
        users = view.users(value)
        if len(users) != 1 or value.is_graph_output():
            break
        user = users[0]
        if view.is_linear(user):
            break
        if is_op(user, "Transpose"):
            perm = user.attributes["perm"].as_ints() if "perm" in user.attributes else None
            labels = None if labels is None or perm is None else "".join(labels[p] for p in perm)
        elif is_op(user, "Reshape", "Flatten", "Squeeze", "Unsqueeze"):
            labels = _reshaped(labels, value, user.outputs[0])
        elif is_op(user, "Mul") and end.gate is None:
            other = user.inputs[1] if user.inputs[0] is value else user.inputs[0]
            gate = None if other is None else _gate(view, other)
            if gate is None:
                break
            if _for_channels(gate[0], value, labels):
                found[-1].left = Refusal("gate", "a gate for every channel: the op's has one number a head")
                break
            end.gate = gate[0]
            end.explained |= gate[1] | {user}
        elif is_op(user, "MatMul", "Einsum"):
            weight = next((v for v in user.inputs if v is not None and view.is_const(v)), None)
            if weight is None or weight.shape is None or len(weight.shape) < 3:
                break
            if len(user.outputs[0].shape or (0,) * 4) < 4:
                break  # it takes all heads together: the projection behind them
            end.weights.append((user, weight))
            labels = einsum_labels(user) if is_op(user, "Einsum") else labels
        elif is_op(user, "Slice", "Split") and (width := _kept_width(view, user, value)) is not None:
            end.width = width
        elif is_op(user, "Where") and user.inputs[2] is value and _never(view, user.inputs[0]):
            end.explained.add(user)
        elif not is_op(user, "Cast", "Identity"):
            break
        value = user.outputs[0]
        depends.add(value)
    return found[::-1]


def _kept_width(view: GraphView, node: ir.Node, value: ir.Value) -> int | None:
    """How many of each head's first channels a cut keeps, where it is one."""
    rank, kept = rank_of(value), node.outputs[0]
    if rank != 4 or any(v.uses() or v.is_graph_output() for v in node.outputs[1:]):
        return None
    limits = channels_cut(view, node, kept, rank)
    return limits[1] if limits is not None and limits[0] == 0 else None


def _labels(core: Core) -> str | None:
    """The axes of the attention's output."""
    rank = None if core.o.shape is None else len(core.o.shape)
    if rank != 4:
        return None
    node = core.product
    if node is None or not is_op(node, "Einsum"):
        return "BHSD"
    return einsum_labels(node)


def einsum_labels(node: ir.Node) -> str | None:
    """The axes of an Einsum's result: batch, then heads (in both operands, or those of the weights) and tokens."""
    left, right = attribute_string(node, "equation", "").replace(" ", "").split("->")
    terms = left.split(",")
    if len(right) != 4 or len(terms) != 2:
        return None
    heads = [c for c in right[1:] if all(c in t for t in terms)]
    if not heads:  # values that all heads share: the probabilities are [batch, heads, queries, keys]
        heads = [c for c in right[1:] if len(terms[0]) == 4 and terms[0][1] == c]
    if len(heads) != 1:
        return None
    return {1: "BHSD", 2: "BSHD"}.get(right.index(heads[0]))


def _reshaped(labels: str | None, before: ir.Value, after: ir.Value) -> str | None:
    if labels is None or before.shape is None or after.shape is None:
        return None
    if len(after.shape) == len(labels):
        return labels
    return None


def _layout(labels: str | None, value: ir.Value) -> str:
    rank = 0 if value.shape is None else len(value.shape)
    if rank == 4:
        return labels if labels in ("BHSD", "BSHD") else "?"
    return {3: "BSC", 2: "NC"}.get(rank, "?")


def _never(view: GraphView, value: ir.Value | None) -> bool:
    """A constant condition that is false everywhere."""
    array = None if value is None or not view.is_const(value) else view.array(value)
    return array is not None and not bool(np.any(array))


def _gate(view: GraphView, value: ir.Value) -> tuple[ir.Value, set[ir.Node]] | None:
    """The gate before its sigmoid, one number a token and head, and the nodes in between."""
    nodes: set[ir.Node] = set()
    for wanted in (True, False):  # before and behind the sigmoid
        while (producer := value.producer()) is not None and producer.inputs:
            source = producer.inputs[0]
            if source is None or not is_op(
                producer, "Unsqueeze", "Reshape", "Cast", "Identity", "Transpose", "Expand", "Squeeze"
            ):
                break
            if not wanted and not is_op(producer, "Cast", "Identity"):
                break
            nodes.add(producer)
            value = source
        if wanted:
            producer = value.producer()
            if not is_op(producer, "Sigmoid") or producer is None or producer.inputs[0] is None:
                return None
            nodes.add(producer)
            value = producer.inputs[0]
    return value, nodes


def _widened(weight: ir.Value) -> ir.Value:
    """The constant that is only widened to float32 for its layer, or the weight itself."""
    producer = weight.producer()
    source = producer.inputs[0] if producer is not None and producer.inputs else None
    if source is None or not is_op(producer, "Cast") or weight.dtype != ir.DataType.FLOAT:
        return weight
    return source if source.dtype in (ir.DataType.FLOAT16, ir.DataType.BFLOAT16) else weight


def is_quantized(weight: ir.Value) -> bool:
    """Is a constant weight dequantized in the graph?"""
    value: ir.Value | None = weight
    while value is not None and (producer := value.producer()) is not None:
        if is_op(producer, "DequantizeLinear"):
            return True
        if not is_op(producer, "Transpose", "Cast", "Reshape", "Identity"):
            return False
        value = producer.inputs[0]
    return False


def _for_channels(gate: ir.Value, x: ir.Value, labels: str | None) -> bool:
    """Has a gate an entry for every channel of the attention's output?"""
    dims, own = static_dims(x), static_dims(gate)
    if not dims or not own or own[-1] is None or own[-1] == 1:
        return False
    if len(dims) < 4:
        return own[-1] == dims[-1]
    heads = dims[2 if labels == "BSHD" else 1]
    whole = None if heads is None or dims[3] is None else heads * dims[3]
    return own[-1] == (dims[3] if len(own) == 4 else whole)


def linear_weight(view: GraphView, value: ir.Value) -> tuple[ir.Node, ir.Value, ir.Value, bool] | None:
    """(node, input, weight, transposed) of the linear layer without bias that gives a value."""
    producer = value.producer()
    if is_op(producer, "Cast") and producer is not None and producer.inputs[0] is not None and is_leaf(view, value):
        producer = producer.inputs[0].producer()
    if producer is None or not is_op(producer, "MatMul", "Gemm"):
        return None
    weight = view.weight_of(producer)
    if weight is None or weight is not producer.inputs[1] or producer.inputs[0] is None:
        return None
    weight = _widened(weight)
    transposed = False
    if producer.op_type == "Gemm":
        if len(producer.inputs) > 2 and producer.inputs[2] is not None:
            return None
        attributes = {n: a.value for n, a in producer.attributes.items()}
        if attributes.get("alpha", 1.0) != 1.0 or attributes.get("transA", 0):
            return None
        transposed = bool(attributes.get("transB", 0))
    return producer, producer.inputs[0], weight, transposed


def base_of(view: GraphView, leaf: ir.Value) -> ir.Value:
    """The linear layer's result that a leaf is cut from, or the leaf."""
    producer = leaf.producer()
    if is_op(producer, "Split", "Slice") and producer is not None and producer.inputs[0] is not None:
        if linear_weight(view, producer.inputs[0]) is not None:
            return producer.inputs[0]
    return leaf
