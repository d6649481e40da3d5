"""The ways from an attention to its operands: keys and values made of latents, or weights absorbed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from ...custom_ops.common.refusal import Refusal
from ..graph import GraphView, attribute_int, attribute_string, is_op, rank_of, static_dims
from .core import Core, scaled
from .flow import Flow, channels_cut, channels_of, joined, unmoved, walk
from .joins import Join, join_of
from .parts import End, Latent, base_of, latent_of, linear_weight, written
from .reasons import normed_heads, other_layer, query_refusal, turned_cache


@dataclass
class Ways:
    """The ways from the attention to its operands, however the weights are applied.

    Attributes:
        q, k, v: walks; ``parts``: for each part of the queries and keys the factor on the scores.
        query: where queries begin; ``query_rope``: where their rotary part does, if that is another layer.
        weights, flips, order: kv_b's constants, transposed or not, and how they are laid out.
    """

    q: Flow
    k: Flow
    v: Flow
    latent: Latent
    k_rope: ir.Value | None
    weights: list[ir.Value]
    flips: list[bool]
    order: str
    rank: int
    scale: float
    query: ir.Value
    columns: int  # H * (Dn + Dv)
    heads: int | None = None
    value: int | None = None
    compute: Callable[[Sequence[np.ndarray]], np.ndarray] | None = None
    query_rope: ir.Value | None = None


def expanded_ways(view: GraphView, core: Core, end: End) -> Ways | Refusal | None:
    """Keys and values are made of latents for every head."""
    q_flows, k_flows = ([walk(view, pair[i]) for pair in core.products] for i in (0, 1))
    v_flow, k_flow, q_flow = walk(view, core.v), joined(k_flows), joined(q_flows)
    v_linear = [leaf for leaf in v_flow.leaves if linear_weight(view, base_of(view, leaf)) is not None]
    if len(v_linear) != 1:
        return normed_heads(view, k_flow, v_flow) or other_layer(view, k_flow, v_flow)
    v_base = base_of(view, v_linear[0])
    own = [leaf for leaf in k_flow.leaves if base_of(view, leaf) is v_base]
    kv_b, order = ([v_base], "heads" if v_linear[0] is v_base else "parts") if len(own) == 1 else ([], "")
    if not kv_b:
        own = _separate(view, v_base, k_flow)
        if not own or v_base is not v_linear[0]:
            return normed_heads(view, k_flow, v_flow)
        kv_b, order = [own[0], v_base], "split"
    layers = [linear_weight(view, leaf) for leaf in kv_b]
    _, source, weight, transposed = layers[-1]  # type: ignore[misc]
    dims = static_dims(weight)
    if dims is None or dims[0] is None or dims[1] is None:
        return None
    rank = dims[1] if transposed else dims[0]
    latent = latent_of(view, source, rank)
    plain = latent.epsilon is None and not latent.joins
    others = [leaf for leaf in k_flow.leaves if leaf not in own]
    if len(others) > 1:
        return turned_cache(view, source) if plain else Refusal("keys", f"keys are made of {len(others) + 1} parts")
    if not others and plain:
        return None  # plain attention whose keys and values share a layer
    if len(core.products) > 1:
        queries = _query_of_each(q_flows, k_flows, own[0])
    else:
        queries = _queries(view, core.products[0][0], q_flow)
    if queries is None:
        return query_refusal(q_flow, k_flow, v_flow)
    query, q_factor = queries[0], q_flow.leaves[queries[0]]
    swapped = _rope_first(view, core.products[0][0], query) if len(queries) == len(core.products) == 1 else None
    if any(abs(f.leaves[q] / q_factor - 1.0) > 1e-6 for f in q_flows for q in f.leaves):
        return Refusal("scale", "parts of the queries are scaled differently")
    if abs(v_flow.leaves[v_linear[0]] - 1.0) > 1e-6:
        return Refusal("values", "values are scaled")
    k_factors = {round(s, 9) for s in k_flow.leaves.values()}
    if len(k_factors) != 1:
        return Refusal("keys", "parts of the keys are scaled differently")
    widths = [channels_of(leaf) for leaf in kv_b]
    if None in widths:
        return Refusal("shape", "the channels of keys and values are not known")
    begin = swapped or [_own_part(view, q, q_flow, turned=len(queries) > 1) for q in queries]
    return Ways(
        q_flow,
        k_flow,
        v_flow,
        latent,
        _own_part(view, others[0], k_flow, turned=False) if others else None,
        [layer[2] for layer in layers if layer is not None],
        [layer[3] for layer in layers if layer is not None],
        order,
        rank,
        q_factor * k_flow.leaves[own[0]],
        begin[0],
        sum(w for w in widths if w is not None),
        query_rope=begin[1] if len(begin) > 1 else None,
    )


def _queries(view: GraphView, value: ir.Value, flow: Flow) -> list[ir.Value] | None:
    """Where queries begin: one leaf, or one for the part that is not rotated and one for the part that is."""
    if len(flow.leaves) == 1:
        return list(flow.leaves)
    parts = _parts_of(view, value) if len(flow.leaves) == 2 else None
    if parts is None or any(len(p.leaves) != 1 or p.lost is not None for p in parts):
        return None
    first, second = _plain_first(parts)
    return [next(iter(first.leaves)), next(iter(second.leaves))]


def _parts_of(view: GraphView, value: ir.Value) -> list[Flow] | None:
    """Where the two parts of each head come from that queries are joined of."""
    producer = value.producer()
    while producer is not None and is_op(producer, "Cast", "Identity", "Transpose", "Reshape", "Mul", "Div"):
        data = [v for v in producer.inputs if v is not None and not view.is_const(v)]
        if len(data) != 1:
            return None
        producer = data[0].producer()
    if not is_op(producer, "Concat") or producer is None or len(producer.inputs) != 2:
        return None
    values = [v for v in producer.inputs if v is not None]
    parts = [walk(view, v) for v in values]
    for value, part in zip(values, parts, strict=True):
        if is_op(value.producer(), "Slice", "Split"):  # it is joined as it was cut
            part.nodes[producer] = None
    return parts if len(parts) == 2 else None


def _plain_first(parts: list[Flow]) -> list[Flow]:
    """The part that is not rotated, then the one that is, as far as one is rotated alone."""
    return parts[::-1] if [bool(p.factors) for p in parts] == [True, False] else parts


def _rope_first(view: GraphView, value: ir.Value, leaf: ir.Value) -> list[ir.Value] | None:
    """Each head's part that is not rotated, then the one that is, where the layer gives them the other way round."""
    parts = _parts_of(view, value)
    if parts is None or any(list(p.leaves) != [leaf] for p in parts):
        return None
    cuts = [_own_part(view, leaf, part, turned=True) for part in _plain_first(parts)]
    limits = []
    for cut in cuts:
        node = cut.producer()
        limits.append(None if node is None or cut is leaf else channels_cut(view, node, cut, rank_of(cut)))
    plain, turned = limits
    first = plain is not None and turned is not None and turned[0] == 0 and plain[0] == turned[1]
    return cuts if first else None


def _query_of_each(q_flows: list[Flow], k_flows: list[Flow], own: ir.Value) -> list[ir.Value] | None:
    """Where queries begin, where two products add up to the scores: that with the keys ``own`` first."""
    if any(len(f.leaves) != 1 or f.lost is not None for f in (*q_flows, *k_flows)):
        return None
    pairs = [(next(iter(q.leaves)), next(iter(k.leaves))) for q, k in zip(q_flows, k_flows, strict=True)]
    first = [q for q, k in pairs if k is own]
    rest = [q for q, k in pairs if k is not own]
    if len(first) != 1 or len(rest) != 1:
        return None
    return first if rest[0] is first[0] else [*first, *rest]


def _own_part(view: GraphView, leaf: ir.Value, flow: Flow, turned: bool) -> ir.Value:
    """What queries or rotary keys take of a layer that gives more, such as an output gate behind each head's query or
    a part that has a norm of its own; ``turned``: behind a transpose too."""
    value = leaf
    for _ in range(4):
        users = [u for u in view.users(value) if u in flow.nodes]
        if len(users) != 1:
            return leaf
        user = users[0]
        if is_op(user, "Split", "Slice"):
            read = [v for v in user.outputs if any(u in flow.nodes for u in view.users(v))]
            dims, whole = static_dims(read[0]) if read else None, static_dims(value)
            cut = dims is not None and whole is not None and len(dims) == 4 and dims[:3] == whole[:3]
            return read[0] if cut and len(read) == 1 else leaf
        if not is_op(user, "Reshape", "Cast", "Identity", "Unsqueeze") and not (turned and is_op(user, "Transpose")):
            return leaf
        value = user.outputs[0]
    return leaf


def _separate(view: GraphView, v_linear: ir.Value, k_flow: Flow) -> list[ir.Value]:
    """The keys' own layer, over the same latent as the values'."""
    source = unmoved(view, linear_weight(view, v_linear)[1])  # type: ignore[index]
    for leaf in k_flow.leaves:
        found = linear_weight(view, leaf)
        if found is not None and unmoved(view, found[1]) is source and len(k_flow.leaves) == 2:
            return [leaf]
    return []


def absorbed_ways(view: GraphView, core: Core, end: End) -> Ways | Refusal | None:
    """Queries go into the latents' space, and what comes out of the attention goes back into the values'."""
    unclear = Refusal("absorbed", "absorbed weights in a form that is not known")
    apart: Apart | None = Apart([q for q, _ in core.products], [k for _, k in core.products])
    if len(core.products) == 1:
        apart = _apart(view, *core.products[0])
    if apart is None or len(apart.q) != 2 or len(end.weights) != 1:
        return unclear
    q_flows = [walk(view, q) for q in apart.q]
    wide = [i for i, f in enumerate(q_flows) if len(f.weights) == 1]
    if len(wide) != 1 or any(len(f.leaves) != 1 for f in q_flows):
        return unclear
    inside, outside = q_flows[wide[0]], q_flows[1 - wide[0]]
    k_value, r_value = apart.k[wide[0]], apart.k[1 - wide[0]]
    key, value = _factors(view, *inside.weights[0]), _factors(view, *end.weights[0])
    if key is None or value is None or outside.weights:
        return unclear
    (key_shape, key_order), (value_shape, value_order) = key, value
    heads, nope, rank = key_shape
    if value_shape[0] != heads or value_shape[1] != rank:
        return unclear
    width = value_shape[2]
    latent, again = latent_of(view, spread_of(view, core.v), rank), latent_of(view, k_value, rank)
    if latent.raw is not again.raw or [j.node for j in latent.joins] != [j.node for j in (*apart.joins, *again.joins)]:
        return Refusal("absorbed", "keys and values are not the same latents")
    k_flow = walk(view, r_value)
    if len(k_flow.leaves) != 1:
        return unclear
    query = next(iter(inside.leaves))
    rotary = next(iter(outside.leaves))
    k_rope, k_factor = next(iter(k_flow.leaves.items()))
    if abs(inside.leaves[query] / (outside.leaves[rotary] * k_factor) - 1.0) > 1e-6:
        return Refusal("scale", "parts of the scores are scaled differently")
    flow = Flow(dict(outside.leaves), {**inside.factors, **outside.factors})
    flow.nodes = {**inside.nodes, **outside.nodes}

    def compute(arrays: Sequence[np.ndarray]) -> np.ndarray:
        up = np.transpose(arrays[0], key_order)  # [H, Dn, R]
        down = np.transpose(arrays[1], value_order)  # [H, R, Dv]
        both = np.concatenate([up.transpose(2, 0, 1), down.transpose(1, 0, 2)], axis=-1)
        return both.reshape(rank, heads * (nope + width))

    v_flow = Flow()
    return Ways(
        flow,
        k_flow,
        v_flow,
        latent,
        k_rope,
        [inside.weights[0][1], end.weights[0][1]],
        [False, False],
        f"absorbed {key_order} {value_order}",
        rank,
        apart.factor * inside.leaves[query],
        query,
        heads * (nope + width),
        heads,
        width,
        compute,
        None if rotary is query else rotary,
    )


@dataclass
class Apart:
    """Queries and keys of the latents' space and of the rotary part, in one order; ``joins``: a packed cache's, which
    holds both keys; ``factor``: of all scores."""

    q: list[ir.Value]
    k: list[ir.Value]
    joins: list[Join] = field(default_factory=list)
    factor: float = 1.0


def _apart(view: GraphView, q: ir.Value, k: ir.Value) -> Apart | None:
    """The parts of queries and keys that lie behind one another in one product."""
    (q, q_factor), (k, k_factor) = _joint(view, q), _joint(view, k)
    joins: list[Join] = []
    node = k.producer()
    join = join_of(view, node) if is_op(node, "Concat") and node is not None else None
    if join is None and node is not None:
        join = written(view, node)
    if join is not None:
        joins.append(join)
        k, more = _joint(view, join.new)
        if more != 1.0:
            return None
    parts = [_behind(q), _behind(k)]
    if parts[0] is None or parts[1] is None:
        return None
    return Apart(parts[0], parts[1], joins, q_factor * k_factor)


def _joint(view: GraphView, value: ir.Value) -> tuple[ir.Value, float]:
    """The value before moves of whole rows, and the factor on the way."""
    factor = 1.0
    while (producer := value.producer()) is not None:
        if is_op(producer, "Mul", "Div") and (found := scaled(view, producer)) is not None:
            value, factor = found[0], factor * found[1]
            continue
        moved = is_op(producer, "Cast", "Identity", "Expand", "Reshape", "Squeeze", "Transpose", "Unsqueeze")
        if not moved or producer.inputs[0] is None or (is_op(producer, "Transpose") and written(view, producer)):
            break
        value = producer.inputs[0]
    return value, factor


def _behind(value: ir.Value) -> list[ir.Value] | None:
    """The two parts that lie behind one another along the channels."""
    node, rank = value.producer(), rank_of(value)
    if not is_op(node, "Concat") or node is None or rank is None or attribute_int(node, "axis", 0) % rank != rank - 1:
        return None
    parts = [v for v in node.inputs if v is not None]
    return parts if len(parts) == 2 else None


def spread_of(view: GraphView, value: ir.Value) -> ir.Value:
    """What all heads share, before it is spread over them."""
    while True:
        value = unmoved(view, value)
        producer = value.producer()
        if not is_op(producer, "Expand") or producer is None or producer.inputs[0] is None:
            return value
        value = producer.inputs[0]


def _factors(
    view: GraphView, node: ir.Node, weight: ir.Value
) -> tuple[tuple[int, int, int], tuple[int, int, int]] | None:
    """Sizes (heads, taken, given) of a matrix for each head, and the order of its axes that this takes."""
    dims = static_dims(weight)
    if dims is not None and len(dims) == 4 and dims[0] == 1:
        return None
    if dims is None or len(dims) != 3 or None in dims:
        return None
    if is_op(node, "MatMul"):
        order = (0, 1, 2)
        if node.inputs[1] is not weight:
            return None
    else:
        left, right = attribute_string(node, "equation", "").replace(" ", "").split("->")
        terms = left.split(",")
        at = 0 if node.inputs[0] is weight else 1
        letters, other = terms[at], terms[1 - at]
        if len(letters) != 3 or len(set(letters)) != 3:
            return None
        heads = [c for c in letters if c in other and c in right]
        taken = [c for c in letters if c in other and c not in right]
        given = [c for c in letters if c not in other and c in right]
        if not len(heads) == len(taken) == len(given) == 1:
            return None
        order = (letters.index(heads[0]), letters.index(taken[0]), letters.index(given[0]))
    h, t, g = (dims[i] for i in order)
    assert h is not None and t is not None and g is not None
    return (h, t, g), order
