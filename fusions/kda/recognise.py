"""From a site to candidates: what the fused op would be there. The proof decides; nothing is believed here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from ...custom_ops.common.refusal import Refusal
from ...custom_ops.kda.spec import KdaConfig
from ..candidate import Candidate, Operand, Parameter, Piece, Result
from ..graph import GraphView, is_op, rank_of
from ..region import Region, backward, cuts, mark_dependents
from ..track import Track
from .convs import ShortConv, short_conv, state_width
from .paths import Path
from .roles import Roles, readings
from .sites import Site
from .tail import Tail, match_tail

#: Readings tried at one site before it is given up.
MAX_READINGS = 48


def read_site(view: GraphView, site: Site) -> Iterator[Reading] | Refusal:
    """Readings of a site, likeliest first, or the reason why there is none."""
    tail = _sound_tail(view, site, match_tail(view, site.x, site.region.depends))
    core = backward(view, [tail.o])
    mark_dependents(view, core, site.anchors)
    if not core.depends:
        return Refusal("anchor", "the recurrence lies behind a linear layer", site.anchors[0].name or "")
    found = readings(view, core)
    if isinstance(found, Refusal):
        return found
    return _build(view, site, core, tail, found)


def _sound_tail(view: GraphView, site: Site, tail: Tail) -> Tail:
    """A tail whose ``o`` is a cut and is not wanted by others; else an empty one."""
    if tail.o is tail.x:
        return tail
    if tail.o.is_graph_output() or tail.o not in cuts(view, site.region, site.x):
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
    reason = Refusal("conv-state", "the graph's own convolution state differs from the op's: the graph goes on making it")
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
    convs = _convolutions(view, roles)
    if isinstance(convs, Refusal):
        not_absorbed.append(convs)
    elif convs is not None:
        built = _with_convolutions(view, roles, convs, settings, operands, parameters, results)
        if isinstance(built, Refusal):
            not_absorbed.append(built)
            convs = None
        else:
            absorbed.append("short convolution")
    if convs is None or isinstance(convs, Refusal):
        for name, path in (("q", roles.q), ("k", roles.k), ("v", roles.v)):
            operand = _operand(_before_norm(path))
            if operand is None:
                return None
            operands[name] = operand

    # --- gate and rate ---
    forget = roles.forget
    if forget is not None:
        operand = _operand(_first_track(roles.g, 0))
        settings |= {"gate_activation": forget.activation, "lower_bound": short(forget.lower_bound)}
        parameters["A_log"] = forget.a_log
        if forget.dt_bias is not None:
            parameters["dt_bias"] = forget.dt_bias
            settings["has_dt_bias"] = True
        absorbed.append("forget gate")
    else:
        operand = _operand(roles.g.end)
        not_absorbed.append(Refusal("gate", "the log decay's formula is not one the op has: it is computed before the op"))
    if operand is None:
        return None
    operands["g"] = operand
    beta = _operand(_first_track(roles.beta, 0) if roles.rate.activation != "none" else _beta_end(roles.beta))
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
    output = site.x if tail is not None else full_tail.o
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
    one_token = _is_one_token(operands)
    return Candidate(
        site.name, site.form, config, operands, parameters, results, region, one_token, absorbed, not_absorbed
    )


def _is_one_token(operands: dict[str, Operand]) -> bool:
    """Is the block frozen at one token, as decode graphs are?"""
    value = operands["beta"].pieces[0].value
    shape = value.shape
    if shape is None or len(shape) < 2:
        return False
    permutation = operands["beta"].pieces[0].permutation
    time = permutation[1] if permutation is not None else 1
    return shape[time] == 1


def short(value: float) -> float:
    """A float32's shortest decimal: attributes are float32, and 1e-06 reads better than 9.999999974752427e-07."""
    return float(str(np.float32(value)))


# --- operands ----------------------------------------------------------------------------------------------------


def _first_track(path: Path, index: int) -> Track:
    """The track before the path's step ``index``; the end where there is no such step."""
    return path.steps[index].before if index < len(path.steps) else path.end


def _beta_end(path: Path) -> Track:
    return path.steps[0].before if path.steps else path.end


def _before_norm(path: Path) -> Track:
    """What the L2 norm reads, after the steps before it; without a norm the last understood step that is not a scale."""
    repeat = next((s for s in path.steps if s.kind == "repeat"), None)
    norm = path.norm()
    if repeat is not None and (norm is None or path.steps.index(repeat) < path.steps.index(norm)):
        return repeat.before
    if norm is not None:
        return norm.before
    scales = [s for s in path.steps if s.kind == "mul"]
    return scales[0].before if scales else path.end


def _operand(track: Track) -> Operand | None:
    """The operand [B, T, C] from where a track stands."""
    labels = [label for label in track.labels if label != "1"]
    if "N" in labels or labels.count("B") != 1 or labels.count("T") != 1:
        return None
    order = sorted(
        range(len(track.labels)),
        key=lambda i: (
            -2 if track.labels[i] == "B" else -1 if track.labels[i] == "T" else 1000 if track.labels[i] == "1" else int(track.labels[i])
        ),
    )
    permutation = tuple(order) if order != list(range(len(order))) else None
    reshape = (0, 0, track.channels) if len(track.labels) != 3 else None
    return Operand((Piece(track.value, permutation, reshape),))


# --- convolution ---------------------------------------------------------------------------------------------------


def _convolutions(view: GraphView, roles: Roles) -> list[ShortConv] | Refusal | None:
    """The convolutions that q, k and v come out of: one packed, or three; None when there is none."""
    nodes: list[ir.Node] = []
    for path in (roles.q, roles.k, roles.v):
        producer = path.border.producer()
        if producer is None or not view.is_depthwise(producer):
            return None if not nodes else Refusal("conv", "not all of q, k and v come out of a convolution")
        if producer not in nodes:
            nodes.append(producer)
    found: list[ShortConv] = []
    for node in nodes:
        conv = short_conv(view, node)
        if isinstance(conv, Refusal):
            return conv
        found.append(conv)
    return found


def _with_convolutions(
    view: GraphView,
    roles: Roles,
    convs: list[ShortConv],
    settings: dict,
    operands: dict[str, Operand],
    parameters: dict[str, Parameter],
    results: dict[str, Result],
) -> Refusal | None:
    """Fill in what absorbing the convolutions takes; touches nothing when it refuses."""
    paths = (roles.q, roles.k, roles.v)
    if len({c.width for c in convs}) != 1:
        return Refusal("conv", f"convolutions of different widths {[c.width for c in convs]}")
    silus = {"silu" in p.kinds() or any(c.silu for c in convs if c.node.outputs[0] is p.border) for p in paths}
    if len(silus) != 1:
        return Refusal("conv", "SiLU behind some of the convolutions only")
    allowed = {"silu", "trim", "sum", "max", "mul", "repeat"}
    if any(set(p.kinds()) - allowed for p in paths):
        return Refusal("conv", "other steps than SiLU between the convolution and the recurrence")
    if len(convs) == 1:
        start = 0
        for path in paths:
            if path.end.low != start:
                return Refusal("conv", "the packed convolution's channels are not in the order q, k, v")
            start = path.end.low + path.channels
        if start != convs[0].channels:
            return Refusal("conv", f"q, k and v use {start} of the convolution's {convs[0].channels} channels")
    elif len(convs) != 3 or any(p.end.low != 0 or p.channels != c.channels for p, c in zip(paths, convs, strict=True)):
        return Refusal("conv", "convolutions that are neither one packed nor one each for q, k and v")
    biases = [c.bias for c in convs]
    if any(b is None for b in biases) and any(b is not None for b in biases):
        return Refusal("conv", "some of the convolutions have a bias, some have none")
    states = [c.state for c in convs]
    if any(s is None for s in states) and any(s is not None for s in states):
        return Refusal("conv", "some of the convolutions carry a state, some do not")

    widths = {state_width(view, c) for c in convs if c.state is not None or c.present is not None}
    settings |= {"conv_width": convs[0].width, "conv_activation": "silu" if silus == {True} else "none"}
    parameters["conv_weight"] = Parameter(tuple(c.weight for c in convs), lambda a: np.concatenate(a).astype(np.float32))
    if all(b is not None for b in biases):
        settings["has_conv_bias"] = True
        parameters["conv_bias"] = Parameter(
            tuple(b for b in biases if b is not None), lambda a: np.concatenate(a).astype(np.float32)
        )
    for name, conv in zip(("q", "k", "v"), convs, strict=False):
        operands[name] = Operand((Piece(conv.data, None if conv.channels_last else (0, 2, 1)),))
    settings["packed_qkv"] = len(convs) == 1
    width = next(iter(widths)) if len(widths) == 1 else None
    if width is None and widths == {None}:
        width = convs[0].width  # a symbol: one number only can be carried from step to step
    if width in (convs[0].width - 1, convs[0].width):
        settings["conv_state_width"] = width
        if all(s is not None for s in states):
            settings["has_conv_state"] = True
            operands["conv_state"] = Operand(tuple(Piece(s) for s in states if s is not None), axis=1)
        presents = [c.present for c in convs]
        if all(p is not None for p in presents):
            settings["has_present_conv_state"] = True
            results["present_conv_state"] = Result(
                tuple(p for p in presents if p is not None), axis=1, sizes=tuple(c.channels for c in convs)
            )
    elif any(s is not None for s in states):
        for name in ("q", "k", "v"):
            operands.pop(name, None)
        for name in ("conv_weight", "conv_bias"):
            parameters.pop(name, None)
        settings |= {"conv_width": 0, "conv_activation": "none", "packed_qkv": False, "has_conv_bias": False}
        return Refusal("conv", f"convolution states of {sorted(map(str, widths))} columns")
    return None


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
    return Result((value,))


def is_near_miss(view: GraphView, site: Site) -> bool:
    """Does a site that gave no candidate look enough like KDA to speak of? It has a decay and a depthwise convolution."""
    return any(
        (p := b.producer()) is not None and view.is_depthwise(p) for b in site.region.borders
    )
