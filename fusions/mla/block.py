"""What stands around an attention: its sizes, scale, rotation and cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import onnx_ir as ir

from ...custom_ops.common.refusal import Refusal
from ..graph import GraphView, attribute_string, is_op, rank_of, static_dims
from .caches import Cache, read_cache
from .core import Core
from .flow import Flow, channels_of, row_width
from .linear import Lin, of_dim
from .masks import Places
from .parts import End, Latent, einsum_labels, ends_of, is_quantized
from .symbolic import Symbolic
from .ways import Ways, absorbed_ways, expanded_ways


@dataclass
class Block:
    """What was found around an attention before masks and rotations are read.

    Attributes:
        q: queries' leaf; q_rope: their rotary part's, where that is another.
        latent: the way to kv_b; k_rope: rotary keys' leaf, or None.
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
    q_rope: ir.Value | None = None


def read_block(view: GraphView, symbolic: Symbolic, core: Core) -> Block | Refusal | None:
    """The block around an attention, why it is none that the op takes, or None: not latent attention at all."""
    name = core.anchor.name or ""
    ends = ends_of(view, core)
    if ends[0].weights:
        found = absorbed_ways(view, core, ends[0])
    elif len(core.products) <= 2:
        found = expanded_ways(view, core, ends[0])
    else:
        return None
    if found is None or isinstance(found, Refusal):
        return None if found is None else replace(found, node=name)
    if core.left is not None:
        return replace(core.left, node=name)
    made = _block(view, symbolic, core, ends[0], found)
    return replace(made, node=name) if isinstance(made, Refusal) else made


def _block(view: GraphView, symbolic: Symbolic, core: Core, end: End, ways: Ways) -> Block | Refusal:
    """Sizes, scale, rotations and cache."""
    sizes = _sizes(core, ways, end)
    if isinstance(sizes, Refusal):
        return sizes
    heads, nope, rope, value = sizes
    core.queries_at = _queries_at(core, heads)
    if ways.order not in ("heads", "split") and any(is_quantized(w) for w in ways.weights):
        return Refusal(
            "quantized", "quantized weights of keys and values that are not stored head by head in front of a MatMul"
        )
    width = (ways.rank if end.weights else nope) + rope  # of what the attention itself multiplies
    scale = ways.scale * (width**-0.5 if core.default_scale else core.scale)
    factors = list(ways.q.factors)
    q_scales = [f for f in factors if channels_of_factor(ways.q, f) == 1]
    factors = [f for f in factors if f not in q_scales]
    if len(q_scales) > 1:
        return Refusal("scale", "several factors for each query")
    if set(ways.k.factors) - set(factors):
        return Refusal("rope", "keys are multiplied with something that queries are not")
    if len(factors) not in (0, 2):
        names = ", ".join(repr(f.name) for f in factors)
        return Refusal("rope", f"queries are multiplied with {names}, not with one cosine and one sine alone")
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
        q_rope=ways.query_rope,
    )
    block.explained = {*core.explained, *ways.latent.nodes, *end.explained, *(cache.nodes if cache else ())}
    return block


def _queries_at(core: Core, heads: int) -> int:
    """The queries' axis in the scores, from the last."""
    for node in core.scored:
        if not is_op(node, "Einsum"):
            continue
        left, right = attribute_string(node, "equation", "").replace(" ", "").split("->")
        terms, dims = left.split(","), static_dims(node.outputs[0])
        if len(right) != 4 or len(terms) != 2:
            continue
        shared = [i for i in (1, 2) if all(right[i] in term for term in terms)]
        if not shared and dims is not None and len(dims) == 4:  # all heads share their keys
            shared = [i for i in (1, 2) if dims[i] == heads]
        if len(shared) == 1:
            return 1 + shared[0]
    return 2


def channels_of_factor(flow: Flow, root: ir.Value) -> int | None:
    """The last dim of a factor where it is multiplied; complex numbers have theirs in front of an axis of size one."""
    node = flow.factors[root]
    dims = [d[-1] for v in node.inputs if v is not None and (d := static_dims(v))]
    own = channels_of(root)
    least = min((d for d in dims if d is not None), default=0)
    if len(dims) > 1 and (set(dims) == {1} or (own == 1 and least > 1)):
        return row_width(root)
    return 1 if own == 1 or least == 1 else own


def _sizes(core: Core, ways: Ways, end: End) -> tuple[int, int, int, int] | Refusal:
    """(heads, nope, rope, value) from the channels of the layers."""
    rope = 0
    if ways.k_rope is not None:
        found = channels_of(ways.k_rope)
        if found is None:
            return Refusal("shape", "the width of the rotary keys is not known")
        rope = found
    q_channels: int | None = 0
    for q in (ways.query, ways.query_rope):
        more = 0 if q is None else channels_of(q) if (rank_of(q) or 0) <= 3 else _q_channels(q)
        q_channels = None if q_channels is None or more is None else q_channels + more
    heads, value = (ways.heads, ways.value) if ways.heads is not None else _heads(core, end)
    if q_channels is None:
        return Refusal("shape", "the channels of queries are not known")
    total = ways.columns
    if heads is None and rope and end.layout in ("BSC", "NC") and (wide := channels_of(end.x)) is not None:
        heads = (q_channels + wide - total) // rope
        value = wide // heads if heads else None
    if not heads or value is None:
        return Refusal("shape", "the number of heads is not known")
    nope = total // heads - value
    if nope < 1 or total % heads or q_channels != heads * (nope + rope):
        return Refusal(
            "heads",
            f"{q_channels} channels of queries, {total} of keys and values and {heads} heads of {value} with {rope} "
            "rotary ones do not make latent attention with as many key heads as query heads",
        )
    return heads, nope, rope, value


def _q_channels(q: ir.Value) -> int | None:
    """Channels of all heads, of queries that come in four axes: a share of the layer's, where they are cut of one."""
    dims, node = static_dims(q), q.producer()
    if dims is None or dims[-1] is None:
        return None
    value = node.inputs[0] if is_op(node, "Slice", "Split") and node is not None else None
    whole = None if value is None else channels_of(value)
    while value is not None and whole:
        if (rank_of(value) or 4) <= 3:
            layer = channels_of(value)
            return None if layer is None else layer // whole * dims[-1]
        node = value.producer()
        value = node.inputs[0] if is_op(node, "Cast", "Reshape", "Transpose") and node is not None else None
    heads = [d for d in dims[1:3] if d is not None]
    return heads[-1] * dims[-1] if len(heads) >= 1 else None


def _heads(core: Core, end: End) -> tuple[int | None, int | None]:
    """(heads, value width) from the attention's output."""
    product = core.o.producer()
    einsum = product is not None and is_op(product, "Einsum")
    own = einsum_labels(product) if einsum and product is not None else "BHSD"
    for value, layout in ((core.o, own), *(() if einsum else ((end.x, end.layout),))):
        dims = static_dims(value)
        if dims is not None and len(dims) == 4 and layout in ("BHSD", "BSHD"):
            heads = dims[1 if layout == "BHSD" else 2]
            if heads is not None and dims[3] is not None:
                return heads, end.width or dims[3]
    for flat in (core.o, core.v):
        dims = static_dims(flat)
        if core.heads and dims is not None and len(dims) == 3 and dims[2] is not None:
            return core.heads, dims[2] // core.heads
    return None, None


def places(block: Block) -> Places:
    """Where the queries stand among the keys."""
    q_dims = block.q.shape
    assert q_dims is not None
    tokens = of_dim(q_dims[1] if len(q_dims) >= 3 else q_dims[0], block.q, 1)
    if len(q_dims) == 4 and q_dims[1] == block.heads:
        tokens = of_dim(q_dims[2], block.q, 2)
    return Places(Lin(0) if block.cache is None else block.cache.length, tokens, block.core.queries_at)
