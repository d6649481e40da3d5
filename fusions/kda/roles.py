"""Which border is which: queries, keys, values, forget gate, update rate, state; told by structure, never by names."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import permutations

import onnx_ir as ir

from ...custom_ops.common.refusal import Refusal
from ..graph import GraphView
from ..region import Region
from .gates import ForgetGate, Rate, forget_gate, update_rate
from .paths import Path, paths_from


@dataclass(frozen=True)
class Roles:
    """One reading of the borders. ``forget`` is None when the log decay is computed outside."""

    q: Path
    k: Path
    v: Path
    g: Path
    beta: Path
    state: ir.Value | None
    num_heads: int
    num_v_heads: int
    head_dim: int
    head_v_dim: int
    forget: ForgetGate | None
    rate: Rate


def is_state(value: ir.Value) -> bool:
    """A recurrent state comes in from outside, with rank 4."""
    return value.producer() is None and value.shape is not None and len(value.shape) == 4


def readings(view: GraphView, region: Region) -> Iterator[Roles] | Refusal:
    """All readings of a region's borders that fit together, likeliest first, or why there is none."""
    states = [b for b in region.borders if is_state(b)]
    paths: list[Path] = []
    for border in region.borders:
        if border in states:
            continue
        found = paths_from(view, region, border)
        if not found:
            return Refusal("border", f"the value {border.name!r} enters the block in a way that is not understood")
        paths.extend(found)
    if len(states) > 1 or (len(paths) < 5 and states):
        # core-only graphs: rank-4 inputs are operands too, and the state is the one that no path explains
        options = _with_rank4_operands(view, region, states, paths)
    else:
        options = [(paths, states[0] if states else None)]
    if not any(len(p) >= 5 for p, _ in options):
        return Refusal("operands", f"{len(paths)} operands found where q, k, v, gate and beta make five")
    return _readings(view, options)


def _with_rank4_operands(
    view: GraphView, region: Region, states: list[ir.Value], paths: list[Path]
) -> list[tuple[list[Path], ir.Value | None]]:
    options: list[tuple[list[Path], ir.Value | None]] = []
    for state in [*reversed(states), None]:
        more = [p for s in states if s is not state for p in paths_from(view, region, s)]
        if len(paths) + len(more) == 5:
            options.append(([*paths, *more], state))
    return options


def _readings(view: GraphView, options: list[tuple[list[Path], ir.Value | None]]) -> Iterator[Roles]:
    for paths, state in options:
        if len(paths) != 5:
            continue
        yield from _of_five(view, paths, state)


def _of_five(view: GraphView, paths: list[Path], state: ir.Value | None) -> Iterator[Roles]:
    normed = [p for p in paths if p.norm() is not None]
    rest = [p for p in paths if p.norm() is None]
    betas = sorted(rest, key=lambda p: (p.end.channels, "sigmoid" not in p.kinds()))
    tried: set[tuple[int, ...]] = set()
    for beta in betas[:2]:
        rate, num_v_heads = update_rate(view, beta), beta.end.channels
        if rate is None:
            rate, beta = Rate("none", 1.0), _without_steps(beta)
        others = [p for p in paths if p.border is not beta.border or p.end is not beta.end]
        others = [p for p in others if p.end.value is not beta.end.value]
        if len(others) != 4:
            continue
        for g in sorted(
            (p for p in others if p not in normed), key=lambda p: forget_gate(view, p, num_v_heads) is None
        ):
            three = [p for p in others if p is not g]
            for q, k, v in _orders(three, normed):
                roles = _fit(view, q, k, v, g, beta, rate, num_v_heads, state)
                key = tuple(id(p) for p in (q, k, v, g, beta))
                if roles is not None and key not in tried:
                    tried.add(key)
                    yield roles


def _orders(three: list[Path], normed: list[Path]) -> Iterator[tuple[Path, Path, Path]]:
    """q and k are the normed ones, in graph order first; without norms all orders are tried."""
    if len([p for p in three if p in normed]) == 2:
        a, b = (p for p in three if p in normed)
        v = next(p for p in three if p not in normed)
        yield a, b, v
        yield b, a, v
    else:
        yield from ((a, b, c) for a, b, c in permutations(three))


def _without_steps(path: Path) -> Path:
    return replace(path, steps=(), trail=path.trail[:1], end=path.trail[0])


def _fit(
    view: GraphView,
    q: Path,
    k: Path,
    v: Path,
    g: Path,
    beta: Path,
    rate: Rate,
    num_v_heads: int,
    state: ir.Value | None,
) -> Roles | None:
    if g.end.channels % num_v_heads or v.end.channels % num_v_heads:
        return None
    head_dim, head_v_dim = g.end.channels // num_v_heads, v.end.channels // num_v_heads
    if q.channels != k.channels or q.channels % head_dim:
        return None
    num_heads = q.channels // head_dim
    if num_v_heads % num_heads or head_dim == 1:
        return None
    for path in (q, k):
        norm = path.norm()
        if norm is not None and norm.before.factors[-1] != head_dim:
            return None
    norms = [p.norm() for p in (q, k)]
    a, b = norms
    if (a is None) != (b is None) or (a is not None and b is not None and (a.kind, a.epsilon) != (b.kind, b.epsilon)):
        return None
    return Roles(
        q, k, v, g, beta, state, num_heads, num_v_heads, head_dim, head_v_dim, forget_gate(view, g, num_v_heads), rate
    )
