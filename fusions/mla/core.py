"""The attention itself: from a Softmax or an Attention node to its queries, keys, values, scale and masks."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import isfinite

import onnx_ir as ir

from ...custom_ops.common.refusal import Refusal
from ..graph import (
    GraphView,
    attribute_float,
    attribute_int,
    attribute_ints,
    attribute_string,
    is_op,
    rank_of,
    static_dims,
)
from .guards import is_row_guard, nan_guard, row_nodes
from .masks import MaskTerm, as_truths, nothing

#: Why latent attention is left as it is; of other attention nothing is said.
_SOFTCAP = Refusal("softcap", "attention with a soft cap on its scores")
_SINKS = Refusal("sinks", "scores of sinks beside those of the keys, which the op has not")


@dataclass
class Core:
    """One attention.

    Attributes:
        anchor: the Softmax or Attention node.
        form: "softmax", "attention" (one node), "absorbed" (keys and values are latents).
        products: pairs (queries, keys) whose products add up to the scores.
        v: values; o: the attention's output.
        scale: what the graph multiplies the scores with behind the products.
        terms: masks; causal: an attribute says so.
        explained: guards and the steps between products and o.
        left: why the op can't take it, where it is latent attention.
    """

    anchor: ir.Node
    form: str
    products: list[tuple[ir.Value, ir.Value]]
    v: ir.Value
    o: ir.Value
    scale: float = 1.0
    terms: list[MaskTerm] = field(default_factory=list)
    causal: bool = False
    explained: set[ir.Node] = field(default_factory=set)
    joins: list[tuple[str, ir.Value, ir.Value, ir.Value | None]] = field(default_factory=list)
    default_scale: bool = False
    product: ir.Node | None = None  # of the probabilities and the values
    heads: int = 0  # where the attention says it
    scored: list[ir.Node] = field(default_factory=list)  # the products that make the scores
    left: Refusal | None = None
    queries_at: int = 2  # the queries' axis in the scores, from the last: 3 for [batch, queries, heads, keys]


def is_anchor(node: ir.Node) -> bool:
    """A node that every attention has one of."""
    if is_op(node, "Softmax", "Attention"):
        return True
    return node.op_type == "MultiHeadAttention" and node.domain == "com.microsoft"


def read_core(view: GraphView, node: ir.Node) -> Core | Refusal | None:
    """The attention around an anchor; a refusal, or None where it is something else."""
    if node.op_type == "MultiHeadAttention":
        return _multi_head(view, node)
    return _attention(view, node) if node.op_type == "Attention" else _softmax(view, node)


def _multi_head(view: GraphView, node: ir.Node) -> Core | Refusal | None:
    """ORT's MultiHeadAttention, as onnxscript's fusions for ORT leave it: three axes, an added mask."""
    inputs = [*node.inputs, *[None] * 10]
    q, k, v = inputs[:3]
    if q is None or k is None or v is None or any(x is None or rank_of(x) != 3 for x in (q, k, v)):
        return None
    if inputs[3] is not None or inputs[4] is not None or any(x is not None for x in inputs[6:]):
        return Refusal("attention", "MultiHeadAttention with a bias, a padding mask or a cache", node.name or "")
    scale = attribute_float(node, "scale", 0.0)
    core = Core(node, "attention", [(q, k)], v, node.outputs[0], scale or 1.0, default_scale=not scale)
    core.explained.add(node)
    core.causal = bool(attribute_int(node, "unidirectional", 0))
    core.heads = attribute_int(node, "num_heads", 0)
    if inputs[5] is not None:
        core.terms.append(MaskTerm("add", inputs[5]))
    _unpack(view, core)
    _guards(view, core)
    return core


def _unpack(view: GraphView, core: Core) -> None:
    """Take [batch, heads, tokens, channels] where the graph has it on all sides of three axes."""
    nodes: set[ir.Node] = set()

    def before(value: ir.Value) -> ir.Value | None:
        flat = value.producer()
        turn = flat.inputs[0].producer() if is_op(flat, "Reshape") and flat and flat.inputs[0] is not None else None
        # keys and values may have come in another order: where they come from is what counts
        turns = _swaps(turn) or (value is not q and is_op(turn, "Transpose"))
        source = turn.inputs[0] if turns and turn is not None else None
        if source is None or (static_dims(source) or [0, 0])[1] != core.heads:
            return None
        nodes.update(n for n in (flat, turn) if n is not None)
        return source

    (q, k), *_ = core.products
    found = [before(value) for value in (q, k, core.v)]
    split = view.users(core.o)
    turned = view.users(split[0].outputs[0]) if len(split) == 1 and is_op(split[0], "Reshape") else []
    counts = view.ints(split[0].inputs[1]) if turned else None
    if None in found or len(turned) != 1 or not _swaps(turned[0]) or not counts or len(counts) != 4:
        return
    if counts[2] != core.heads or core.o.is_graph_output() or split[0].outputs[0].is_graph_output():
        return
    queries, keys, values = (value for value in found if value is not None)
    core.products, core.v, core.o = [(queries, keys)], values, turned[0].outputs[0]
    core.explained |= {*nodes, split[0], turned[0]}


def _swaps(node: ir.Node | None) -> bool:
    """Does it exchange heads and tokens?"""
    return node is not None and is_op(node, "Transpose") and attribute_ints(node, "perm") == [0, 2, 1, 3]


def is_product(node: ir.Node) -> bool:
    """A product of two computed values; ORT's optimiser takes a scale into it."""
    return is_op(node, "MatMul", "Einsum") or (node.domain == "com.microsoft" and node.op_type == "FusedMatMul")


def _attention(view: GraphView, node: ir.Node) -> Core | Refusal | None:
    q, k, v = node.inputs[:3]
    if q is None or k is None or v is None:
        return None
    mask = node.inputs[3] if len(node.inputs) > 3 else None
    scale = attribute_float(node, "scale", 0.0)
    core = Core(node, "attention", [(q, k)], v, node.outputs[0], scale or 1.0, default_scale=not scale)
    core.explained.add(node)
    core.causal = bool(attribute_int(node, "is_causal", 0))
    core.heads = attribute_int(node, "q_num_heads", 0)
    core.left = _SOFTCAP if attribute_float(node, "softcap", 0.0) else None
    if mask is not None:
        core.terms.append(MaskTerm("keep" if mask.dtype == ir.DataType.BOOL else "add", mask))
    if len(node.inputs) > 5 and node.inputs[4] is not None and node.inputs[5] is not None:
        presents = [node.outputs[i] if len(node.outputs) > i else None for i in (1, 2)]
        core.joins = [("key", node.inputs[4], k, presents[0]), ("value", node.inputs[5], v, presents[1])]
    if len(node.inputs) > 6 and node.inputs[6] is not None:
        return Refusal("lengths", "Attention with nonpad_kv_seqlen", node.name or "")
    _guards(view, core)
    return core


def _softmax(view: GraphView, node: ir.Node) -> Core | Refusal | None:
    scores = node.inputs[0]
    rank = None if scores is None else rank_of(scores)
    axis = attribute_int(node, "axis", -1)
    if scores is None or (axis != -1 and (rank is None or axis != rank - 1)):
        return None
    core = Core(node, "softmax", [], node.outputs[0], node.outputs[0])
    core.explained.add(node)
    refused = _before(view, core, scores)
    if refused is not None or not core.products:
        return refused
    return core if _after(view, core, node.outputs[0]) else None


def leads_to_product(view: GraphView, value: ir.Value | None) -> bool:
    """Leads it, through masks and scales, to a product of two computed values?"""
    for _ in range(16):
        producer = None if value is None else value.producer()
        if producer is None or view.is_const(producer.outputs[0]):
            return False
        if is_product(producer):
            return view.weight_of(producer) is None
        if is_op(producer, "Where"):
            return leads_to_product(view, producer.inputs[1]) or leads_to_product(view, producer.inputs[2])
        if is_op(producer, "Add"):
            return leads_to_product(view, producer.inputs[0]) or leads_to_product(view, producer.inputs[1])
        if is_op(producer, "Mul", "Div"):
            value = producer.inputs[1] if view.scalar(producer.inputs[0]) is not None else producer.inputs[0]
        elif is_op(producer, "Cast", "Identity", "Reshape", "Tanh", "Unsqueeze", "Squeeze") or _less_most(
            view, producer
        ):
            value = producer.inputs[0]  # a soft cap, Tanh, is met and refused later
        else:
            return False
    return False


def _before(view: GraphView, core: Core, value: ir.Value) -> Refusal | None:
    """Take the scores apart: masks, scales, the products."""
    unscaled = True  # no scale between here and the softmax: a mask counts as it is
    for _ in range(24):
        producer = value.producer()
        if producer is None:
            return None
        if is_op(producer, "Cast", "Identity", "Reshape", "Squeeze", "Unsqueeze") and producer.inputs[0] is not None:
            core.explained.add(producer)
            value = producer.inputs[0]
        elif is_op(producer, "Tanh") and producer.inputs[0] is not None:
            core.left, value = _SOFTCAP, producer.inputs[0]
        elif _less_most(view, producer) and producer.inputs[0] is not None and producer.inputs[1] is not None:
            core.explained |= {n for n in (producer, producer.inputs[1].producer()) if n is not None}
            value = producer.inputs[0]
        elif is_op(producer, "Concat"):
            parts = [v for v in producer.inputs if v is not None and leads_to_product(view, v)]
            if len(parts) != 1:
                return None
            core.left = _SINKS
            value = parts[0]
        elif is_op(producer, "Mul", "Div") and (found := scaled(view, producer)) is not None:
            core.explained.add(producer)
            value, factor = found
            core.scale *= factor
            unscaled = False
        elif is_op(producer, "Add"):
            a, b = producer.inputs
            if a is None or b is None:
                return None
            sides = [leads_to_product(view, a), leads_to_product(view, b)]
            if all(sides):
                return _products(view, core, value)
            if not any(sides):
                return None
            value, mask = (a, b) if sides[0] else (b, a)
            if not unscaled:
                return Refusal("mask", "a mask is added before the scores are scaled", producer.name or "")
            core.explained.add(producer)
            core.terms.append(MaskTerm("add", mask))
        elif is_op(producer, "Where"):
            cond, yes, no = producer.inputs
            if cond is None or yes is None or no is None:
                return None
            least = view.scalar(no)
            if least is None or least > nothing(no.dtype) or not leads_to_product(view, yes):
                return Refusal("mask", "a mask that is not understood", producer.name or "")
            core.explained.add(producer)
            core.terms.append(MaskTerm("keep", cond))
            value = yes
        else:
            return _products(view, core, value)
    return None


def _less_most(view: GraphView, node: ir.Node) -> bool:
    """Does it take off each row's largest score, which changes no probability?"""
    most = node.inputs[1].producer() if is_op(node, "Sub") and node.inputs[1] is not None else None
    if most is None or not is_op(most, "ReduceMax") or most.inputs[0] is not node.inputs[0]:
        return False
    rank = rank_of(node.outputs[0])
    axes = attribute_ints(most, "axes") or (view.ints(most.inputs[1]) if len(most.inputs) > 1 else None)
    return rank is not None and bool(axes) and [a % rank for a in axes or ()] == [rank - 1]


def scaled(view: GraphView, node: ir.Node) -> tuple[ir.Value, float] | None:
    """What a product with a number multiplies, and the number."""
    a, b = node.inputs
    factor = view.scalar(b)
    if a is not None and factor and isfinite(factor):
        return a, (1.0 / factor if node.op_type == "Div" else factor)
    factor = view.scalar(a)
    if b is not None and factor and isfinite(factor) and node.op_type == "Mul":
        return b, factor
    return None


def _products(view: GraphView, core: Core, value: ir.Value) -> Refusal | None:
    producer = value.producer()
    if producer is None:
        return None
    if is_op(producer, "Add"):
        for side in producer.inputs:
            if side is None:
                return None
            refused = _products(view, core, side)
            if refused is not None:
                return refused
        return None
    if is_op(producer, "Cast", "Identity", "Squeeze", "Unsqueeze", "Reshape", "Transpose"):
        return None if producer.inputs[0] is None else _products(view, core, producer.inputs[0])
    if is_product(producer) and len(producer.inputs) == 2:
        a, b = producer.inputs
        if a is not None and b is not None and not view.is_const(a) and not view.is_const(b):
            alpha = attribute_float(producer, "alpha", 1.0)
            if alpha != 1.0 and core.products:
                return Refusal("scale", "parts of the scores are scaled differently", producer.name or "")
            core.scale *= alpha
            if producer.op_type == "Einsum" and "->" not in attribute_string(producer, "equation", ""):
                return Refusal("einsum", "an Einsum without an explicit result", producer.name or "")
            core.products.append((a, b))
            core.scored.append(producer)
    return None


def _after(view: GraphView, core: Core, value: ir.Value) -> bool:
    """From the probabilities to the product with the values."""
    for _ in range(16):
        users = view.users(value)
        guarded = nan_guard(view, value)
        if guarded is not None:
            core.explained |= guarded[0]
            value = guarded[1]
            continue
        if len(users) != 1:
            return False
        user = users[0]
        if is_product(user) and attribute_float(user, "alpha", 1.0) == 1.0 and len(user.inputs) == 2:
            other = user.inputs[1] if user.inputs[0] is value else user.inputs[0]
            if other is None or view.is_const(other):
                return False
            core.v, core.o, core.product = other, user.outputs[0], user
            _guards(view, core)
            return True
        if is_op(user, "Where"):
            if not is_row_guard(view, _kept(view, core), user, value):
                return False
            core.explained |= row_nodes(user)
        elif not is_op(user, "Cast", "Identity", "Reshape", "Squeeze", "Unsqueeze"):
            if core.left is None or not is_op(user, "Slice", "Split"):  # a column of sinks is cut off again
                return False
        core.explained.add(user)
        value = user.outputs[0]
    return False


def _guards(view: GraphView, core: Core) -> None:
    """Behind the attention: rows without a key that counts become zeros; NaN becomes zero."""
    for _ in range(3):
        users = view.users(core.o)
        guarded = nan_guard(view, core.o)
        if guarded is not None:
            core.explained |= guarded[0]
            core.o = guarded[1]
            continue
        if len(users) != 1 or not is_row_guard(view, _kept(view, core), users[0], core.o):
            return
        where = users[0]
        core.explained |= {where, *row_nodes(where)}
        core.o = where.outputs[0]


def _kept(view: GraphView, core: Core) -> set[ir.Value]:
    """The truths of the keys that count, of each mask."""
    found: set[ir.Value] = set()
    for term in core.terms:
        truths = (term.value, set()) if term.kind == "keep" else as_truths(view, term)
        if truths is not None:
            found.add(truths[0])
    return found
