"""Caches of latents, or of keys and values, that a block reads and continues."""

from __future__ import annotations

from dataclasses import dataclass, field

import onnx_ir as ir

from ...custom_ops.common.refusal import Refusal
from ..candidate import Operand, Piece, Result
from ..graph import GraphView, rank_of, static_dims
from .core import Core
from .elements import Element, Tensor, Unknown, Vec, put
from .flow import Flow
from .joins import Join
from .linear import Cond, Lin, Look, axis, negate, of_dim
from .parts import Latent
from .symbolic import Symbolic


@dataclass
class Cache:
    """A cache that grows, or one of fixed size that new tokens are written into.

    Attributes:
        kind: "latent" or "expanded".
        length: tokens in it before the call.
        pasts: by operand name ("past_latent", "past_k_rope", "past_key", "past_value"): what comes in and goes out.
        packed: rotary keys lie behind the latents in one tensor.
        lengths: the value that says how many tokens are there; None for a cache that grows.
        nodes: what makes the places of new tokens.
        turned: tokens lie before heads in a cache of keys and values, [B, P, H, .].
    """

    kind: str
    length: Lin
    pasts: dict[str, tuple[ir.Value, ir.Value | None]] = field(default_factory=dict)
    packed: bool = False
    lengths: ir.Value | None = None
    nodes: set[ir.Node] = field(default_factory=set)
    turned: bool = False

    @property
    def keys(self) -> str:
        """The size of the keys' axis, for proofs."""
        return "past + tokens" if self.lengths is None else "past"

    def fill(
        self,
        rank: int,
        rope: int,
        operands: dict[str, Operand],
        results: dict[str, Result],
        settings: dict[str, object],
    ) -> None:
        """Write operands, results and settings of the cache."""
        settings |= {"cache": self.kind, "has_past": True, "packed_cache": self.packed}
        wanted = any(p is not None for _, p in self.pasts.values())
        settings["has_present"] = wanted
        if self.lengths is not None:
            settings["static_cache"] = True
            first = next(iter(self.pasts.values()))[0]
            one = first.shape is not None and first.shape[0] == 1
            each = None if one else first
            operands["cache_lengths"] = Operand((Piece(self.lengths, reshape=(-1,), each_row_of=each),))
        for name, (past, present) in self.pasts.items():
            axes = 4 if self.kind == "expanded" else len(past.shape or ())
            width = rank + rope if self.packed else rank if name == "past_latent" else rope
            turn = (0, 2, 1, 3) if self.turned else None
            if self.turned:
                operands[name] = Operand((Piece(past, turn, axes=("batch", "past", None, None)),))
            elif self.kind == "expanded":
                operands[name] = Operand((Piece(past, axes=("batch", None, "past", None)),))
            elif axes == 4:
                operands[name] = Operand((Piece(past, reshape=(0, -1, width), axes=("batch", None, "past", None)),))
            else:
                operands[name] = Operand((Piece(past, axes=("batch", "past", None)),))
            if present is not None and wanted:
                reshape = (0, 1, -1, width) if self.kind == "latent" and axes == 4 else None
                results[name.replace("past", "present")] = Result((present,), reshape=reshape, permutation=turn)


def read_cache(
    view: GraphView, symbolic: Symbolic, core: Core, latent: Latent, k_flow: Flow, v_flow: Flow, rope: int
) -> Cache | Refusal | None:
    """The block's cache; None without one."""
    others = [j for j in k_flow.joins if j not in v_flow.joins]
    if core.joins:
        pasts = {f"past_{kind}": (past, present) for kind, past, _, present in core.joins}
        first = core.joins[0][1]
        if first.shape is None or len(first.shape) != 4:
            return Refusal("cache", "a cache of keys without four axes")
        return Cache("expanded", of_dim(first.shape[2], first, 2), dict(pasts))
    if latent.joins:
        ropes = [j for j in k_flow.joins if j.node not in {x.node for x in latent.joins}]
        return _latents(symbolic, latent.joins, ropes, rope)
    if v_flow.joins:
        if len(v_flow.joins) != 1 or len(others) != 1:
            return Refusal("cache", "keys and values are not joined to one cache each")
        return _expanded(symbolic, others[0], v_flow.joins[0])
    if others:
        return Refusal("cache", "rotary keys have a cache, latents have none, or one in another layout")
    return None


def _latents(symbolic: Symbolic, latents: list[Join], ropes: list[Join], rope: int) -> Cache | Refusal:
    packed = bool(rope) and not ropes
    if len(latents) != 1 or len(ropes) > 1:
        return Refusal("cache", "latents and rotary keys are not joined to one cache each")
    for join in (*latents, *ropes):
        axis = (rank_of(join.present) or 0) - 2
        dims = static_dims(join.past)
        if join.axis != axis or dims is None or (len(dims) == 4 and dims[1] != 1) or len(dims) not in (3, 4):
            return Refusal("cache", "a cache of latents in another layout")
    found = _with_length(symbolic, "latent", [*latents, *ropes])
    if isinstance(found, Refusal):
        return found
    found.packed = packed
    found.pasts["past_latent"] = (latents[0].past, latents[0].present)
    if ropes:
        found.pasts["past_k_rope"] = (ropes[0].past, ropes[0].present)
    return found


def _expanded(symbolic: Symbolic, keys: Join, values: Join) -> Cache | Refusal:
    for join in (keys, values):
        if join.axis not in (1, 2) or join.axis != keys.axis or rank_of(join.past) != 4:
            return Refusal("cache", "a cache of keys and values in another layout")
    found = _with_length(symbolic, "expanded", [keys, values])
    if isinstance(found, Refusal):
        return found
    if keys.axis == 1:  # each call turns them: no more than the copies that joining them takes
        if found.lengths is not None or None in [(static_dims(j.past) or [None] * 4)[2] for j in (keys, values)]:
            return Refusal("cache", "a cache of keys and values in another layout")
        found.turned = True
    found.pasts = {"past_key": (keys.past, keys.present), "past_value": (values.past, values.present)}
    return found


def _with_length(symbolic: Symbolic, kind: str, joins: list[Join]) -> Cache | Refusal:
    """The cache without its tensors: how many tokens are there."""
    first = joins[0]
    assert first.past.shape is not None
    if all(j.index is None for j in joins):
        return Cache(kind, of_dim(first.past.shape[first.axis], first.past, first.axis))
    if any(j.index is None for j in joins):
        return Refusal("static-cache", "a part of the cache grows, a part is written into")
    try:
        places = [symbolic(j.index) for j in joins]
    except Unknown:
        return _unclear("are made in a way that has no closed form")
    elements = [_places(p, j) for p, j in zip(places, joins, strict=True)]
    element = elements[0]
    if any(e != element for e in elements) or not isinstance(element, Lin):
        return _unclear("are not the same for keys and values")
    start = element.put({"@2": Lin(0)})
    steps = element - start
    one = first.way in ("truths", "falses") or places[0].shape[-first.along].number == 1
    if steps != axis(2) and not (steps == Lin(0) and one):
        source = next((a.value.name for a, _ in element.terms if isinstance(a, Look)), None)
        if source is None:
            return _unclear("do not rise by one")
        return _unclear(f"are read one by one from {source!r}, which may hold any")
    if start.const or len(start.terms) != 1 or start.terms[0][1] != 1 or not isinstance(start.terms[0][0], Look):
        return _unclear("do not start at a value of the graph")
    value = start.terms[0][0].value
    dims = static_dims(value)
    if dims is None or any(d != 1 for d in dims):
        return _unclear(f"start at one of several entries of {value.name!r}")
    nodes = {n for j in joins if j.index is not None for n in symbolic.nodes_of(j.index)}
    nodes |= {j.node for j in joins if j.way in ("truths", "falses")}  # chooses by what was just read
    return Cache(kind, start, lengths=value, nodes=nodes)


def _places(tensor: Tensor, join: Join) -> Element | None:
    """The place of each new token, tokens counted along the last axis but one as in an index of ScatterND, [tokens, 1];
    None where an index tells others."""
    element = tensor.element
    if join.way == "places":
        return put(element, {f"@{join.along}": axis(2)}) if join.along != 2 else element
    if join.way == "whole":
        if not isinstance(element, Vec):
            return None
        *outer, own = element.items
        for i, item in enumerate(outer):  # every sequence, and every head, its own
            rank = len(tensor.shape)
            if item != (Lin(0) if tensor.shape[i].number == 1 else axis(rank - i)):
                return None
        return own
    if isinstance(element, Cond) and join.way == "falses":
        element = negate(element)
    if not isinstance(element, Cond) or element.kind != "eq":
        return None
    slope = element.lin.put({"@2": Lin(1)}) - element.lin.put({"@2": Lin(0)})
    rest = element.lin.put({"@2": Lin(0)})  # place - rest == 0, or rest - place
    return None if slope.number not in (1, -1) else rest.times(-(slope.number or 0))


def _unclear(why: str) -> Refusal:
    return Refusal(
        "static-cache",
        f"the places of a fixed-size cache that new tokens are written into {why}: the op writes tokens one behind the "
        "other; make the places in the graph from one start (`start + arange(tokens)`), or export one token",
    )
