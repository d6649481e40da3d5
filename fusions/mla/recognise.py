"""From an attention to candidates: what the fused op would be there. The proof decides; nothing is believed here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import onnx_ir as ir

from ...custom_ops.common.refusal import Refusal
from ...custom_ops.mla.spec import MlaConfig
from ..candidate import Candidate, Operand, Parameter, Piece, Result
from ..graph import GraphView, attribute_string, is_op, rank_of, static_dims
from ..region import Region, backward
from .caches import Cache, read_cache
from .core import Core
from .flow import Flow, channels_of, unmoved, walk
from .linear import Lin, of_dim
from .masks import Mask, read_masks
from .op import MLA
from .parts import End, Latent, ends_of, latent_of, linear_weight
from .symbolic import Symbolic


@dataclass
class Block:
    """What was found around an attention before masks and rotations are read.

    Attributes:
        q: queries' leaf; latent: the way to kv_b; k_rope: rotary keys' leaf, or None.
        sizes: heads, nope, rope, value and latent width.
        weights: kv_b's constants and whether each is transposed; ``split``: keys and values have a layer each.
        factors: roots of cosines and sines; q_scale: a factor of each query.
    """

    core: Core
    end: End
    q: ir.Value
    latent: Latent
    k_rope: ir.Value | None
    heads: int
    nope: int
    rope: int
    value: int
    rank: int
    weights: list[tuple[ir.Value, bool]]
    order: str
    scale: float
    factors: list[ir.Value]
    q_scale: ir.Value | None
    q_flow: Flow
    cache: Cache | None = None
    explained: set[ir.Node] = field(default_factory=set)
    compute: Callable[[Sequence[np.ndarray]], np.ndarray] | None = None


def read_block(view: GraphView, symbolic: Symbolic, core: Core) -> Block | Refusal | None:
    """The block around an attention, why it is none that the op takes, or None: not latent attention at all."""
    name = core.anchor.name or ""
    ends = ends_of(view, core)
    if ends[0].weights:
        found = _absorbed(view, core, ends[0])
    elif len(core.products) == 1:
        found = _expanded(view, core, ends[0])
    else:
        return None
    if found is None or isinstance(found, Refusal):
        return None if found is None else replace(found, node=name)
    made = _block(view, symbolic, core, ends[0], found)
    return replace(made, node=name) if isinstance(made, Refusal) else made


@dataclass
class _Ways:
    """The ways from the attention to its operands, however the weights are applied.

    Attributes:
        q, k, v: walks; ``parts``: for each part of the queries and keys the factor on the scores.
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
    compute: Any = None


def _base(view: GraphView, leaf: ir.Value) -> ir.Value:
    """The linear layer's result that a leaf is cut from, or the leaf."""
    producer = leaf.producer()
    if is_op(producer, "Split", "Slice") and producer is not None and producer.inputs[0] is not None:
        if linear_weight(view, producer.inputs[0]) is not None:
            return producer.inputs[0]
    return leaf


def _expanded(view: GraphView, core: Core, end: End) -> _Ways | Refusal | None:
    """Keys and values are made of latents for every head."""
    (q_value, k_value), v_value = core.products[0], core.v
    v_flow, k_flow, q_flow = walk(view, v_value), walk(view, k_value), walk(view, q_value)
    v_linear = [leaf for leaf in v_flow.leaves if linear_weight(view, _base(view, leaf)) is not None]
    if len(v_linear) != 1:
        return None
    v_base = _base(view, v_linear[0])
    own = [leaf for leaf in k_flow.leaves if _base(view, leaf) is v_base]
    kv_b, order = ([v_base], "heads" if v_linear[0] is v_base else "parts") if len(own) == 1 else ([], "")
    if not kv_b:
        own = _separate(view, v_base, k_flow)
        if not own or v_base is not v_linear[0]:
            return None
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
        return None if plain else Refusal("keys", f"keys are made of {len(others) + 1} parts")
    if not others and plain:
        return None  # plain attention whose keys and values share a layer
    refused = _query_refusal(q_flow, k_flow, v_flow)
    if refused is not None:
        return refused
    query, q_factor = next(iter(q_flow.leaves.items()))
    if abs(v_flow.leaves[v_linear[0]] - 1.0) > 1e-6:
        return Refusal("values", "values are scaled")
    k_factors = {round(s, 9) for s in k_flow.leaves.values()}
    if len(k_factors) != 1:
        return Refusal("keys", "parts of the keys are scaled differently")
    widths = [channels_of(leaf) for leaf in kv_b]
    if None in widths:
        return Refusal("shape", "the channels of keys and values are not known")
    return _Ways(
        q_flow,
        k_flow,
        v_flow,
        latent,
        others[0] if others else None,
        [layer[2] for layer in layers if layer is not None],
        [layer[3] for layer in layers if layer is not None],
        order,
        rank,
        q_factor * k_flow.leaves[own[0]],
        query,
        sum(w for w in widths if w is not None),
    )


def _query_refusal(q_flow: Flow, k_flow: Flow, v_flow: Flow) -> Refusal | None:
    if len(q_flow.leaves) == 1:
        return None
    lost = next((f.lost for f in (q_flow, k_flow, v_flow) if f.lost is not None), None)
    if lost is not None:
        return Refusal("flow", f"{lost.op_type} between the projections and the attention")
    return Refusal("queries", f"queries are made of {len(q_flow.leaves)} parts")


def _absorbed(view: GraphView, core: Core, end: End) -> _Ways | Refusal | None:
    """Queries go into the latents' space, and what comes out of the attention goes back into the values'."""
    unclear = Refusal("absorbed", "absorbed weights in a form that is not known")
    if len(core.products) != 2 or len(end.weights) != 1:
        return unclear
    q_flows = [walk(view, q) for q, _ in core.products]
    wide = [i for i, f in enumerate(q_flows) if len(f.weights) == 1]
    if len(wide) != 1 or any(len(f.leaves) != 1 for f in q_flows):
        return unclear
    inside, outside = q_flows[wide[0]], q_flows[1 - wide[0]]
    k_value, r_value = core.products[wide[0]][1], core.products[1 - wide[0]][1]
    key, value = _factors(view, *inside.weights[0]), _factors(view, *end.weights[0])
    if key is None or value is None or outside.weights:
        return unclear
    (key_shape, key_order), (value_shape, value_order) = key, value
    heads, nope, rank = key_shape
    if value_shape[0] != heads or value_shape[1] != rank:
        return unclear
    width = value_shape[2]
    latent, again = latent_of(view, core.v, rank), latent_of(view, k_value, rank)
    if latent.raw is not again.raw or [j.node for j in latent.joins] != [j.node for j in again.joins]:
        return Refusal("absorbed", "keys and values are not the same latents")
    k_flow = walk(view, r_value)
    if len(k_flow.leaves) != 1:
        return unclear
    query = next(iter(inside.leaves))
    if next(iter(outside.leaves)) is not query:
        return Refusal("queries", "queries are made of 2 parts")
    k_rope, k_factor = next(iter(k_flow.leaves.items()))
    if abs(inside.leaves[query] / (outside.leaves[query] * k_factor) - 1.0) > 1e-6:
        return Refusal("scale", "parts of the scores are scaled differently")
    flow = Flow(dict(outside.leaves), {**inside.factors, **outside.factors})
    flow.nodes = {**inside.nodes, **outside.nodes}

    def compute(arrays: Sequence[np.ndarray]) -> np.ndarray:
        up = np.transpose(arrays[0], key_order)  # [H, Dn, R]
        down = np.transpose(arrays[1], value_order)  # [H, R, Dv]
        both = np.concatenate([up.transpose(2, 0, 1), down.transpose(1, 0, 2)], axis=-1)
        return both.reshape(rank, heads * (nope + width))

    v_flow = Flow()
    return _Ways(
        flow,
        k_flow,
        v_flow,
        latent,
        k_rope,
        [inside.weights[0][1], end.weights[0][1]],
        [False, False],
        f"absorbed {key_order} {value_order}",
        rank,
        inside.leaves[query],
        query,
        heads * (nope + width),
        heads,
        width,
        compute,
    )


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


def _block(view: GraphView, symbolic: Symbolic, core: Core, end: End, ways: _Ways) -> Block | Refusal:
    """Sizes, scale, rotations and cache."""
    sizes = _sizes(core, ways, end)
    if isinstance(sizes, Refusal):
        return sizes
    heads, nope, rope, value = sizes
    scale = ways.scale * ((nope + rope) ** -0.5 if core.default_scale else core.scale)
    factors = list(ways.q.factors)
    q_scales = [f for f in factors if channels_of_factor(ways.q, f) == 1]
    factors = [f for f in factors if f not in q_scales]
    if len(q_scales) > 1:
        return Refusal("scale", "several factors for each query")
    if set(ways.k.factors) - set(factors):
        return Refusal("rope", "keys are multiplied with something that queries are not")
    if len(factors) not in (0, 2):
        return Refusal("rope", f"{len(factors)} factors in the rotation: a cosine and a sine were expected")
    cache = read_cache(view, symbolic, core, ways.latent, ways.k, ways.v, rope)
    if isinstance(cache, Refusal):
        return cache
    block = Block(
        core,
        end,
        ways.query,
        ways.latent,
        ways.k_rope,
        heads,
        nope,
        rope,
        value,
        ways.rank,
        list(zip(ways.weights, ways.flips, strict=True)),
        ways.order,
        scale,
        factors,
        q_scales[0] if q_scales else None,
        ways.q,
        cache,
        compute=ways.compute,
    )
    block.explained = {*core.explained, *ways.latent.nodes, *end.explained, *(cache.nodes if cache else ())}
    return block


def _separate(view: GraphView, v_linear: ir.Value, k_flow: Flow) -> list[ir.Value]:
    """The keys' own layer, over the same latent as the values'."""
    source = unmoved(view, linear_weight(view, v_linear)[1])  # type: ignore[index]
    for leaf in k_flow.leaves:
        found = linear_weight(view, leaf)
        if found is not None and unmoved(view, found[1]) is source and len(k_flow.leaves) == 2:
            return [leaf]
    return []


def channels_of_factor(flow: Flow, root: ir.Value) -> int | None:
    """The last dim of a factor where it is multiplied."""
    node = flow.factors[root]
    dims = [d[-1] for v in node.inputs if v is not None and (d := static_dims(v))]
    own = channels_of(root)
    if own == 1 or (dims and min((d for d in dims if d is not None), default=0) == 1):
        return 1
    return own


def _product_of(value: ir.Value, axes: slice) -> int | None:
    dims = static_dims(value)
    if dims is None or any(d is None for d in dims[axes]):
        return None
    return int(np.prod([d for d in dims[axes] if d is not None]))


def _sizes(core: Core, ways: _Ways, end: End) -> tuple[int, int, int, int] | Refusal:
    """(heads, nope, rope, value) from the channels of the layers."""
    rope = 0
    if ways.k_rope is not None:
        found = channels_of(ways.k_rope)
        if found is None:
            return Refusal("shape", "the width of the rotary keys is not known")
        rope = found
    q = ways.query
    q_channels = channels_of(q) if (rank_of(q) or 0) <= 3 else _q_channels(q)
    heads, value = (ways.heads, ways.value) if ways.heads is not None else _heads(core, end)
    if q_channels is None:
        return Refusal("shape", "the channels of queries are not known")
    total = ways.columns
    if heads is None and rope and end.layout in ("BSC", "NC") and (wide := channels_of(end.x)) is not None:
        heads = (q_channels + wide - total) // rope
        value = wide // heads if heads else None
    if not heads or value is None or q_channels % heads or total % heads:
        return Refusal("shape", "the number of heads is not known")
    nope = total // heads - value
    if nope < 1 or q_channels // heads != nope + rope:
        return Refusal(
            "heads",
            f"{q_channels} channels of queries, {total} of keys and values and {heads} heads of {value} with {rope} "
            "rotary ones do not make latent attention with as many key heads as query heads",
        )
    return heads, nope, rope, value


def _q_channels(q: ir.Value) -> int | None:
    """Channels of queries that come in four axes."""
    dims = static_dims(q)
    if dims is None or dims[-1] is None:
        return None
    heads = [d for d in dims[1:3] if d is not None]
    return heads[-1] * dims[-1] if len(heads) >= 1 else None


def _heads(core: Core, end: End) -> tuple[int | None, int | None]:
    """(heads, value width) from the attention's output."""
    for value, layout in ((core.o, "BHSD"), (end.x, end.layout)):
        dims = static_dims(value)
        if dims is not None and len(dims) == 4 and layout in ("BHSD", "BSHD"):
            heads = dims[1 if layout == "BHSD" else 2]
            if heads is not None and dims[3] is not None and not is_op(core.o.producer(), "Einsum"):
                return heads, dims[3]
    for flat in (core.o, core.v):
        dims = static_dims(flat)
        if core.heads and dims is not None and len(dims) == 3 and dims[2] is not None:
            return core.heads, dims[2] // core.heads
    return None, None


# --- candidates -------------------------------------------------------------------------------------------------------


def candidates(view: GraphView, symbolic: Symbolic, block: Block, name: str, form: str) -> Iterator[Candidate]:
    """Candidates of a block, likeliest first."""
    offset, tokens = _places(block)
    masks = read_masks(view, symbolic, block.core.terms, block.core.causal, offset, tokens)
    for mask in masks:
        for rope, cos, sin in _rotations(view, block):
            found = _candidate(view, block, mask, rope, cos, sin, name, form)
            if found is not None:
                yield found


def _places(block: Block) -> tuple[Lin, Lin]:
    """Where the first query stands among the keys, and how many queries there are."""
    q_dims = block.q.shape
    assert q_dims is not None
    tokens = of_dim(q_dims[1] if len(q_dims) >= 3 else q_dims[0], block.q, 1)
    if len(q_dims) == 4 and q_dims[1] == block.heads:
        tokens = of_dim(q_dims[2], block.q, 2)
    return (Lin(0) if block.cache is None else block.cache.length), tokens


def _rotations(view: GraphView, block: Block) -> list[tuple[str, ir.Value | None, ir.Value | None]]:
    """(rope, cos, sin), likeliest first."""
    if not block.factors:
        return [("none", None, None)]
    if len(block.factors) != 2:
        return []
    a, b = block.factors
    first, second = (b, a) if _is_sine(view, a) and not _is_sine(view, b) else (a, b)
    kinds = _kinds(view, block)
    return [(kind, *pair) for pair in ((first, second), (second, first)) for kind in kinds]


def _is_sine(view: GraphView, value: ir.Value) -> bool:
    """Is it a sine, by its operation or its name?"""
    for _ in range(12):
        producer = value.producer()
        if is_op(producer, "Sin", "Cos"):
            return is_op(producer, "Sin")
        if producer is None or not producer.inputs or producer.inputs[0] is None:
            break
        value = producer.inputs[0]
    return (value.name or "").lower().startswith(("s", "sin"))


def _kinds(view: GraphView, block: Block) -> list[str]:
    paired = any(
        (is_op(n, "Slice") and len(n.inputs) > 4 and view.ints(n.inputs[4]) == [2])
        or (is_op(n, "Reshape") and (d := static_dims(n.outputs[0])) is not None and len(d) == 5 and d[-1] == 2)
        for n in block.q_flow.nodes
    )
    return ["deinterleaved", "interleaved", "half"] if paired else ["half", "deinterleaved", "interleaved"]


def _rows(value: ir.Value, width: int, *, label: str = "tokens") -> Piece | None:
    """A value of [B or 1, S, width], however many axes of one it has."""
    dims = value.shape
    if dims is None:
        return None
    rank = len(dims)
    if width == 1 and (static_dims(value) or [0])[-1] != 1:
        # a number for each token, without a last axis
        if rank == 2:
            return Piece(value, axes=(_batch(dims[0]), label))
        return Piece(value, reshape=(1, -1), axes=(label,)) if rank == 1 else None
    if rank == 2:
        return Piece(value, reshape=(1, -1) if width == 1 else (1, -1, width), axes=(label, None))
    if rank == 3:
        return Piece(value, reshape=(0, 0) if width == 1 else None, axes=(_batch(dims[0]), label, None))
    if rank == 4 and (dims[1] == 1 or dims[2] == 1):
        axes = (_batch(dims[0]), None, label, None) if dims[1] == 1 else (_batch(dims[0]), label, None, None)
        return Piece(value, reshape=(0, -1) if width == 1 else (0, -1, width), axes=axes)
    return None


def _batch(dim: int | ir.SymbolicDim) -> str | None:
    return None if dim == 1 else "batch"


def _query(block: Block) -> Piece | None:
    q, channels = block.q, block.heads * (block.nope + block.rope)
    dims = static_dims(q)
    if dims is None:
        return None
    if len(dims) == 3:
        return Piece(q, axes=("batch", "tokens", None))
    if len(dims) == 2:
        return Piece(q, reshape=(1, -1, channels), axes=("tokens", None))
    if len(dims) == 4 and dims[2] == block.heads and dims[3] == block.nope + block.rope:
        return Piece(q, reshape=(0, 0, channels), axes=("batch", "tokens", None, None))
    if len(dims) == 4 and dims[1] == block.heads:
        return Piece(q, (0, 2, 1, 3), (0, 0, channels), axes=("batch", None, "tokens", None))
    return None


def _wide(value: ir.Value, width: int) -> Piece | None:
    """A latent or a rotary key [B, S, width], with or without an axis of size one; rows are one sequence."""
    dims = static_dims(value)
    if dims is None or dims[-1] != width:
        return None
    if len(dims) == 3:
        return Piece(value, axes=("batch", "tokens", None))
    if len(dims) == 2:
        return Piece(value, reshape=(1, -1, width), axes=("tokens", None))
    if len(dims) == 4 and dims[1] == 1:
        return Piece(value, reshape=(0, -1, width), axes=("batch", None, "tokens", None))
    if len(dims) == 4 and dims[2] == 1:
        return Piece(value, reshape=(0, -1, width), axes=("batch", "tokens", None, None))
    return None


def _packed(view: GraphView, block: Block) -> ir.Value | None:
    """The value that latent and rotary key are cut from, one behind the other."""
    if block.k_rope is None:
        return None
    a, b = block.latent.raw.producer(), block.k_rope.producer()
    if a is None or b is None or not a.inputs or a.inputs[0] is not b.inputs[0] or a.inputs[0] is None:
        return None
    if channels_of(a.inputs[0]) != block.rank + block.rope:
        return None
    if a is b and is_op(a, "Split") and list(a.outputs)[:2] == [block.latent.raw, block.k_rope]:
        return a.inputs[0]
    if is_op(a, "Slice") and is_op(b, "Slice"):
        starts = [view.ints(n.inputs[1]) for n in (a, b)]
        if starts == [[0], [block.rank]]:
            return a.inputs[0]
    return None


def _candidate(
    view: GraphView,
    block: Block,
    mask: Mask,
    rope: str,
    cos: ir.Value | None,
    sin: ir.Value | None,
    name: str,
    form: str,
) -> Candidate | None:
    operands: dict[str, Operand] = {}
    parameters: dict[str, Parameter] = {}
    results: dict[str, Result] = {}
    absorbed: list[str] = []
    settings: dict[str, object] = {}

    def give(operand: str, piece: Piece | None) -> bool:
        if piece is None:
            return False
        operands[operand] = Operand((piece,))
        return True

    if not give("q", _query(block)):
        return None
    packed = _packed(view, block)
    if packed is not None:
        if not give("latent", _wide(packed, block.rank + block.rope)):
            return None
        settings["packed_latent"] = True
    else:
        if not give("latent", _wide(block.latent.raw, block.rank)):
            return None
        if block.k_rope is not None and not give("k_rope", _wide(block.k_rope, block.rope)):
            return None
    _weights(block, parameters)
    if block.latent.epsilon is not None:
        settings |= {"has_kv_norm": True, "kv_norm_eps": short(block.latent.epsilon)}
        latent, rank = block.latent, block.rank
        parameters["kv_norm_weight"] = Parameter(
            tuple(latent.weights), lambda a: latent.norm_weight(rank, a), form=f"{latent.factor}"
        )
        absorbed.append("kv norm")
    if rope != "none":
        assert cos is not None and sin is not None
        width = channels_of(cos)
        if width not in (block.rope, block.rope // 2):
            return None
        for operand, value in (("cos", cos), ("sin", sin)):
            piece = _rows(value, width)
            if piece is None:
                return None
            if view.is_const(value):
                parameters[operand] = Parameter((value,), _constant_rows(width), form="rows")
            else:
                operands[operand] = Operand((piece,))
        settings["cos_width"] = width
        absorbed.append("rope")
    if block.q_scale is not None:
        if not give("q_scale", _rows(block.q_scale, 1)):
            return None
        settings["has_q_scale"] = True
        absorbed.append("query scale")
    if mask.operand is not None:
        piece = _mask_piece(block, mask)
        if piece is None:
            return None
        operands["attn_mask"] = Operand((piece,))
        settings |= {"has_mask": True, "bool_mask": mask.is_bool}
    if block.core.causal or (block.core.terms and (mask.operand is None or mask.keys_only)):
        absorbed.append("mask")
    if block.end.gate is not None:
        give("gate", _rows_of_heads(block.end.gate, block.heads))
        if "gate" not in operands:
            return None
        settings["gate_activation"] = "sigmoid"
        absorbed.append("output gate")
    if block.cache is not None:
        block.cache.fill(block.rank, block.rope, operands, results, settings)
        absorbed.append(f"cache of {'latents' if settings['cache'] == 'latent' else 'keys and values'}")
    laid = _output(block)
    if laid is None:
        return None
    results = {"o": laid, **results}
    tokens = _places(block)[1].number
    causal = 1 if mask.causal or (tokens == 1 and mask.operand is None and not mask.window) else 0
    config = MlaConfig(
        block.heads,
        block.nope,
        block.rope,
        block.value,
        block.rank,
        short(block.scale),
        rope=rope,
        causal=causal,
        window=mask.window,
        **settings,  # type: ignore[arg-type]
    )
    if config.check() is not None:
        return None
    explained = frozenset(block.explained | mask.nodes)
    candidate = Candidate(
        MLA,
        name,
        form,
        config,
        operands,
        parameters,
        results,
        Region([], [], []),
        one_token=tokens == 1,
        absorbed=absorbed,
        notes=list(mask.notes),
        explained=explained,
    )
    candidate.region = _region(view, candidate)
    return candidate


def _region(view: GraphView, candidate: Candidate) -> Region:
    given = set(candidate.input_values())
    return backward(view, candidate.output_values(), lambda v: v in given)


def _constant_rows(width: int):  # type: ignore[no-untyped-def]
    def compute(arrays: Sequence[np.ndarray]) -> np.ndarray:
        return arrays[0].reshape(1, -1, width)

    return compute


def _weights(block: Block, parameters: dict[str, Parameter]) -> None:
    """kv_b_weight [R, H*(Dn+Dv)], each head key | value."""
    heads, nope, value, rank, order = block.heads, block.nope, block.value, block.rank, block.order
    sources = tuple(w for w, _ in block.weights)
    flips = [t for _, t in block.weights]
    noise = 0.3 / rank**0.5
    shape = (rank, heads * (nope + value))
    if order == "heads" and not flips[0]:
        parameters["kv_b_weight"] = Parameter(sources, None, noise=noise)
        return

    if block.compute is not None:
        parameters["kv_b_weight"] = Parameter(sources, block.compute, noise=noise, shape=shape, form=order)
        return

    def compute(arrays: Sequence[np.ndarray]) -> np.ndarray:
        plain = [a.T if t else a for a, t in zip(arrays, flips, strict=True)]
        if order == "heads":
            return plain[0]
        key, val = plain if order == "split" else (plain[0][:, : heads * nope], plain[0][:, heads * nope :])
        parts = [key.reshape(rank, heads, nope), val.reshape(rank, heads, value)]
        return np.concatenate(parts, axis=-1).reshape(shape)

    parameters["kv_b_weight"] = Parameter(sources, compute, noise=noise, shape=shape, form=f"{order} {flips}")


def _mask_piece(block: Block, mask: Mask) -> Piece | None:
    value = mask.operand
    assert value is not None
    dims = value.shape
    if dims is None:
        return None
    keys = "tokens" if block.cache is None else block.cache.keys
    if mask.keys_only:
        return Piece(value, reshape=(0, 1, 1, -1), axes=(_batch(dims[0]), keys)) if len(dims) == 2 else None
    if len(dims) == 2:
        if dims[0] == 1:
            return Piece(value, reshape=(1, 1, 1, -1), axes=(None, keys))
        return Piece(value, reshape=(1, 1, 0, -1), axes=("tokens", keys)) if False else None
    if len(dims) != 4:
        return None
    rows = None if dims[2] == 1 else "tokens"
    return Piece(value, axes=(_batch(dims[0]), None, rows, keys))


def _rows_of_heads(value: ir.Value, heads: int) -> Piece | None:
    dims = static_dims(value)
    if dims is None:
        return None
    if len(dims) == 3 and dims[2] == heads:
        return Piece(value, axes=("batch", "tokens", None))
    if len(dims) == 2 and dims[1] == heads:
        return Piece(value, reshape=(1, -1, heads), axes=("tokens", None))
    if len(dims) == 4 and dims[2] == heads and dims[3] == 1:
        return Piece(value, reshape=(0, 0, heads), axes=("batch", "tokens", None, None))
    return None


def _output(block: Block) -> Result | None:
    x, layout = block.end.x, block.end.layout
    if layout == "BSC":
        dims = static_dims(x)
        return Result((x,)) if dims is not None and dims[2] in (None, block.heads * block.value) else None
    if layout == "NC":
        return Result((x,), reshape=(-1, block.heads * block.value))
    heads = (0, 0, block.heads, block.value)
    if layout == "BSHD":
        return Result((x,), reshape=heads)
    if layout == "BHSD":
        return Result((x,), reshape=heads, permutation=(0, 2, 1, 3))
    return None


def short(value: float) -> float:
    """A float32's shortest decimal."""
    return float(str(np.float32(value)))
