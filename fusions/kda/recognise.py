"""From a site to candidates: what the fused op would be there. The proof decides; nothing is believed here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import onnx_ir as ir

from ...custom_ops.common.refusal import Refusal
from ...custom_ops.kda.spec import KdaConfig
from ..candidate import Candidate, Operand, Parameter, Piece, Result
from ..graph import GraphView, is_op, rank_of, static_dims
from ..region import Region, backward, cuts, mark_dependents
from .op import KDA
from .operands import (
    before_norm,
    convolutions,
    explained_nodes,
    first_track,
    is_one_token,
    operand_at,
    short,
    with_convolutions,
)
from .roles import Roles, readings
from .sites import Site
from .tail import Tail, match_tail

#: Readings tried at one site before it is given up.
MAX_READINGS = 48
#: Values tried as the recurrence's output, beside the one before norm and gate.
MAX_ENDS = 8


def read_site(view: GraphView, site: Site) -> Iterator[Reading] | Refusal:
    """Readings of a site, likeliest first, or the reason why there is none.

    First the recurrence is taken to end where a norm and a gate begin. Where that leads nowhere, every other value that
    all of its influence passes through is tried: something unknown may stand between recurrence and projection.
    """
    tail = _sound_tail(view, site, match_tail(view, site.x, site.region.depends))
    others = [v for v in cuts(view, site.region, site.x) if v is not tail.o and (rank_of(v) or 0) in (2, 3, 4)]
    first: Refusal | None = None
    found: list[Iterator[Reading]] = []
    for end in (tail, *(Tail(v, v) for v in others[:MAX_ENDS])):
        core = backward(view, [end.o])
        mark_dependents(view, core, site.anchors)
        readings_here = (
            readings(view, core)
            if core.depends
            else Refusal("anchor", "the recurrence lies behind a linear layer", site.anchors[0].name or "")
        )
        if isinstance(readings_here, Refusal):
            first = first or readings_here
        else:
            found.append(_build(view, site, core, end, readings_here))
    if not found:
        return first or Refusal("reading", "no end of the recurrence was found")
    return chain(*found)


def _sound_tail(view: GraphView, site: Site, tail: Tail) -> Tail:
    """A tail whose ``o`` is a cut and is not wanted by others; else an empty one."""
    if tail.o is tail.x:
        return tail
    wanted = tail.o.is_graph_output() or any(u not in site.region for u in view.users(tail.o))
    if wanted or tail.o not in cuts(view, site.region, site.x):
        return Tail(site.x, site.x)
    return tail


@dataclass(frozen=True)
class Reading:
    """One reading of a site. ``core`` is the recurrence with what lies before it, scale 1; ``full`` takes the norm and
    the output gate in as well, and is None where there are none to take in."""

    core: Candidate
    full: Candidate | None

    def scaled(self, scale: float) -> list[Candidate]:
        """The candidates to prove, most complete first, with the scale that screening measured."""
        found: list[Candidate] = []
        for candidate in (self.full, self.core):
            if candidate is not None:
                found += [candidate, *_without_present_conv_state(candidate)]
        return [replace(c, config=replace(c.config, scale=scale)) for c in found]


def _without_present_conv_state(candidate: Candidate) -> list[Candidate]:
    """The candidate that leaves the convolution's next state to the graph.

    Some exports cut that state from the last tokens and give fewer columns for prompts shorter than the convolution.
    """
    if "present_conv_state" not in candidate.results:
        return []
    reason = Refusal(
        "conv-state", "the graph's own convolution state differs from the op's: the graph goes on making it"
    )
    return [
        replace(
            candidate,
            config=replace(candidate.config, has_present_conv_state=False),
            results={n: r for n, r in candidate.results.items() if n != "present_conv_state"},
            not_absorbed=[*candidate.not_absorbed, reason],
        )
    ]


def _build(view: GraphView, site: Site, core: Region, tail: Tail, found: Iterator[Roles]) -> Iterator[Reading]:
    count = 0
    for roles in found:
        for state_layout in ("KV", "VK"):
            for head_major in (False, True):
                bare = _candidate(view, site, core, None, tail, roles, state_layout, head_major)
                if bare is None:
                    continue
                full = None
                if tail.o is not tail.x:
                    full = _candidate(view, site, core, tail, tail, roles, state_layout, False)
                yield Reading(bare, full)
                count += 1
                if count >= MAX_READINGS:
                    return


def _candidate(
    view: GraphView,
    site: Site,
    core: Region,
    tail: Tail | None,
    full_tail: Tail,
    roles: Roles,
    state_layout: str,
    head_major: bool,
) -> Candidate | None:
    operands: dict[str, Operand] = {}
    parameters: dict[str, Parameter] = {}
    results: dict[str, Result] = {}
    absorbed: list[str] = []
    not_absorbed: list[Refusal] = []
    settings: dict = {
        "num_heads": roles.num_heads,
        "num_v_heads": roles.num_v_heads,
        "head_dim": roles.head_dim,
        "head_v_dim": roles.head_v_dim,
        "scale": 1.0,
        "state_layout": state_layout,
        "beta_activation": roles.rate.activation,
        "beta_scale": short(roles.rate.scale),
    }
    if roles.rate.activation != "none":
        absorbed.append("beta sigmoid")

    # --- queries, keys and values: convolution and L2 norm ---
    norm = roles.q.norm()
    if norm is not None:
        settings |= {"qk_l2norm": norm.kind, "l2norm_eps": short(norm.epsilon)}
        absorbed.append("L2 norm")
    convs = convolutions(view, roles)
    if isinstance(convs, Refusal):
        not_absorbed.append(convs)
    elif convs is not None:
        built = with_convolutions(view, roles, convs, settings, operands, parameters, results)
        if isinstance(built, Refusal):
            not_absorbed.append(built)
            convs = None
        else:
            absorbed.append("short convolution")
    if convs is None or isinstance(convs, Refusal):
        for name, path in (("q", roles.q), ("k", roles.k), ("v", roles.v)):
            operand = operand_at(before_norm(path))
            if operand is None:
                return None
            operands[name] = operand

    # --- gate and rate ---
    forget = roles.forget
    if forget is not None:
        operand = operand_at(first_track(roles.g))
        settings |= {"gate_activation": forget.activation, "lower_bound": short(forget.lower_bound)}
        parameters["A_log"] = forget.a_log
        if forget.dt_bias is not None:
            parameters["dt_bias"] = forget.dt_bias
            settings["has_dt_bias"] = True
        absorbed.append("forget gate")
    else:
        operand = operand_at(roles.g.source(roles.g.end))
        not_absorbed.append(
            Refusal("gate", "the log decay's formula is not one the op has: it is computed before the op")
        )
    if operand is None:
        return None
    operands["g"] = operand
    beta = operand_at(first_track(roles.beta))
    if beta is None:
        return None
    operands["beta"] = beta

    # --- state ---
    if roles.state is not None:
        settings["has_initial_state"] = True
        operands["initial_state"] = Operand((Piece(roles.state),))
    final = _final_state(view, site, core, roles)
    if final is not None:
        settings["has_final_state"] = True
        results["final_state"] = Result((final,))
    elif state_layout == "VK" and roles.state is None:
        return None

    # --- norm and output gate ---
    output = full_tail.x if tail is not None else full_tail.o
    if tail is not None:
        if not _tail_settings(view, tail, roles, settings, operands, parameters, absorbed):
            return None
    elif full_tail.o is not site.x:
        not_absorbed.append(Refusal("tail", "norm and output gate behind the block stay as they are"))
    results = {"o": _output_result(output, roles, head_major), **results}
    if head_major and results["o"].permutation is None:
        return None
    region = backward(view, [t for r in results.values() for t in r.targets])
    config = KdaConfig(**settings)
    if config.check() is not None:
        return None
    one_token = is_one_token(operands)
    return Candidate(
        KDA,
        site.name,
        site.form,
        config,
        operands,
        parameters,
        results,
        region,
        one_token,
        absorbed,
        not_absorbed,
        explained=explained_nodes(view, roles, tail),
    )


# --- state, norm, gate ---------------------------------------------------------------------------------------------


def _final_state(view: GraphView, site: Site, core: Region, roles: Roles) -> ir.Value | None:
    """The state after the last token, where it leaves the block."""
    want = {roles.head_dim, roles.head_v_dim}
    options: list[ir.Value] = [*site.others]
    options += [v for n in core.nodes for v in n.outputs if v.is_graph_output() and v in core.depends]
    for value in options:
        if value is site.x:
            continue
        shape = value.shape
        if shape is None:
            continue
        if len(shape) == 4 and set(list(shape)[2:]) <= want and shape[1] in (roles.num_v_heads, None):
            return value
    return None


def _tail_settings(
    view: GraphView,
    tail: Tail,
    roles: Roles,
    settings: dict,
    operands: dict[str, Operand],
    parameters: dict[str, Parameter],
    absorbed: list[str],
) -> bool:
    dim = roles.head_v_dim
    if tail.epsilon is not None:
        settings |= {"has_norm": True, "norm_eps": short(tail.epsilon)}

        def weight(arrays: Sequence[np.ndarray]) -> np.ndarray | None:
            product = np.ones(dim)
            for array in arrays:
                if array.size not in (1, dim):
                    return None
                product = product * array.reshape(-1).astype(np.float64)
            return product.astype(np.float32)

        arrays = [a for w in tail.weights if (a := view.array(w)) is not None]
        if len(arrays) != len(tail.weights) or weight(arrays) is None:
            return False
        parameters["norm_weight"] = Parameter(tail.weights, weight)
        absorbed.append("RMS norm")
    if tail.gate is not None:
        piece = _gate_piece(view, tail.gate, roles)
        if piece is None:
            return False
        settings["output_gate"] = tail.activation
        operands["gate"] = Operand((piece,))
        absorbed.append(f"output gate ({tail.activation})")
    return True


def _gate_piece(view: GraphView, gate: ir.Value, roles: Roles) -> Piece | None:
    """The gate as [B, T, HV*V]: back through reshapes to a value of rank 3, or the value reshaped."""
    value = gate
    while True:
        producer = value.producer()
        if rank_of(value) == 3 or producer is None or not is_op(producer, "Reshape", "Cast", "Identity"):
            break
        inner = producer.inputs[0]
        if inner is None or rank_of(inner) == 2:
            break
        value = inner
    channels = roles.num_v_heads * roles.head_v_dim
    if rank_of(value) == 2 or _is_heads(value, roles):
        return Piece(value, None, (0, 1, channels))
    if rank_of(value) == 3:
        return Piece(value)
    return Piece(value, None, (0, 0, channels)) if rank_of(value) in (4, 5) else None


def _output_result(value: ir.Value, roles: Roles, head_major: bool) -> Result:
    """How the op's output [B, T, HV*V] becomes the graph's value."""
    rank = rank_of(value)
    heads, dim = roles.num_v_heads, roles.head_v_dim
    if rank == 4:
        return Result((value,), (0, 0, heads, dim), (0, 2, 1, 3) if head_major else None)
    if rank == 2:
        return Result((value,), (-1, heads * dim))
    if _is_heads(value, roles):
        return Result((value,), (-1, heads, dim))
    return Result((value,))


def _is_heads(value: ir.Value, roles: Roles) -> bool:
    """[B, HV, V]: one token without a time axis."""
    dims = static_dims(value)
    return (
        dims is not None
        and len(dims) == 3
        and dims[1:] == [roles.num_v_heads, roles.head_v_dim]
        and roles.num_v_heads > 1
    )


def is_near_miss(view: GraphView, site: Site) -> bool:
    """Does a site without a candidate look enough like KDA to speak of: a decay behind a depthwise convolution?"""
    return any((p := b.producer()) is not None and view.is_depthwise(p) for b in site.region.borders)
