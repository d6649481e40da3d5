"""Caches of latents, or of keys and values, that a block reads and continues."""

from __future__ import annotations

from dataclasses import dataclass, field

import onnx_ir as ir

from ...custom_ops.common.refusal import Refusal
from ..candidate import Operand, Piece, Result
from ..graph import GraphView, rank_of, static_dims
from .core import Core
from .flow import Flow, Join
from .linear import Lin, of_dim
from .parts import Latent


@dataclass
class Cache:
    """A growing cache.

    Attributes:
        kind: "latent" or "expanded".
        length: tokens in it.
        joins: by operand name: "past_latent", "past_k_rope", "past_key", "past_value".
    """

    kind: str
    length: Lin
    pasts: dict[str, tuple[ir.Value, ir.Value | None]] = field(default_factory=dict)
    packed: bool = False

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
        wanted = any(p is not None and (p.is_graph_output() or len(p.uses()) > 0) for _, p in self.pasts.values())
        settings["has_present"] = wanted
        for name, (past, present) in self.pasts.items():
            axes = 4 if self.kind == "expanded" else len(past.shape or ())
            width = rank + rope if self.packed else rank if name == "past_latent" else rope
            if self.kind == "expanded":
                operands[name] = Operand((Piece(past, axes=("batch", None, "past", None)),))
            elif axes == 4:
                operands[name] = Operand((Piece(past, reshape=(0, -1, width), axes=("batch", None, "past", None)),))
            else:
                operands[name] = Operand((Piece(past, axes=("batch", "past", None)),))
            if present is not None and wanted:
                reshape = (0, 1, -1, width) if self.kind == "latent" and axes == 4 else None
                results[name.replace("past", "present")] = Result((present,), reshape=reshape)


def read_cache(
    view: GraphView, core: Core, latent: Latent, k_flow: Flow, v_flow: Flow, rank: int, rope: int
) -> Cache | Refusal | None:
    """The block's cache; None without one."""
    rope_joins = [j for j in k_flow.joins if j not in v_flow.joins]
    expanded = list(v_flow.joins)
    if core.joins:
        pasts = {f"past_{kind}": (past, present) for kind, past, _, present in core.joins}
        first = core.joins[0][1]
        if first.shape is None or len(first.shape) != 4:
            return Refusal("cache", "a cache of keys without four axes")
        return Cache("expanded", of_dim(first.shape[2], first, 2), dict(pasts))
    if latent.joins:
        return _latents(latent.joins, [j for j in k_flow.joins if j not in latent.joins], rope)
    if expanded:
        keys = list(rope_joins)
        if len(expanded) != 1 or len(keys) != 1:
            return Refusal("cache", "keys and values are not joined to one cache each")
        return _expanded(keys[0], expanded[0])
    if rope_joins:
        return Refusal("cache", "rotary keys have a cache, latents have none")
    return None


def _growing(join: Join, axes: tuple[int, ...]) -> bool:
    return join.index is None and join.axis in axes and rank_of(join.past) == rank_of(join.present)


def _latents(latents: list[Join], ropes: list[Join], rope: int) -> Cache | Refusal:
    if len(latents) != 1 or len(ropes) > 1 or (rope and not ropes):
        return Refusal("cache", "latents and rotary keys are not joined to one cache each")
    for join in (*latents, *ropes):
        if join.index is not None:
            return Refusal("static-cache", "a cache that new tokens are written into, at places of the graph's own")
        axis = (rank_of(join.present) or 0) - 2
        dims = static_dims(join.past)
        if not _growing(join, (axis,)) or dims is None or (len(dims) == 4 and dims[1] != 1) or len(dims) not in (3, 4):
            return Refusal("cache", "a cache of latents in another layout")
    past = latents[0].past
    assert past.shape is not None
    found = Cache("latent", of_dim(past.shape[latents[0].axis], past, latents[0].axis))
    found.pasts["past_latent"] = (past, latents[0].present)
    if ropes:
        found.pasts["past_k_rope"] = (ropes[0].past, ropes[0].present)
    return found


def _expanded(keys: Join, values: Join) -> Cache | Refusal:
    for join in (keys, values):
        if join.index is not None:
            return Refusal("static-cache", "a cache that new tokens are written into, at places of the graph's own")
        if not _growing(join, (2,)) or rank_of(join.past) != 4:
            return Refusal("cache", "a cache of keys and values in another layout")
    past = keys.past
    assert past.shape is not None
    found = Cache("expanded", of_dim(past.shape[2], past, 2))
    found.pasts = {"past_key": (keys.past, keys.present), "past_value": (values.past, values.present)}
    return found
