"""The op's operands from paths: where each is taken from the graph, and what absorbing the convolution takes."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ...custom_ops.common.refusal import Refusal
from ..candidate import Operand, Parameter, Piece, Result
from ..graph import GraphView
from ..region import backward
from ..track import Label, Track
from .convs import ShortConv, short_conv, state_width
from .paths import Path
from .roles import Roles
from .tail import Tail


def is_one_token(operands: dict[str, Operand]) -> bool:
    """Is the block frozen at one token, as decode graphs are?"""
    piece = operands["beta"].pieces[0]
    if piece.adds_time:
        return True
    shape = piece.value.shape
    if shape is None or len(shape) < 2:
        return False
    permutation = piece.permutation
    time = permutation[1] if permutation is not None else 1
    return shape[time] == 1


def short(value: float) -> float:
    """A float32's shortest decimal: attributes are float32, and 1e-06 reads better than 9.999999974752427e-07."""
    return float(str(np.float32(value)))


def first_track(path: Path) -> Track:
    """The operand before all steps of its path."""
    return path.source(path.steps[0].before if path.steps else path.end)


def before_norm(path: Path) -> Track:
    """What the L2 norm reads; without a norm, the last understood value that no scale has touched."""
    repeat = next((s for s in path.steps if s.kind == "repeat"), None)
    norm = path.norm()
    if repeat is not None and (norm is None or path.steps.index(repeat) < path.steps.index(norm)):
        return path.source(repeat.before)
    if norm is not None:
        return path.source(norm.before)
    scales = [s for s in path.steps if s.kind in ("mul", "div")]
    return path.source(scales[0].before if scales else path.end)


def operand_at(track: Track) -> Operand | None:
    """The operand [B, T, C] from where a track stands; rows without a time axis are one token each."""
    labels = [label for label in track.labels if label != "1"]
    rows = labels.count("B") + labels.count("N")
    if rows == 1 and "T" not in labels:
        reshape: tuple[int, ...] | None = (0, 1, track.channels)
    elif "N" in labels or rows != 1 or labels.count("T") != 1:
        return None
    else:
        reshape = (0, 0, track.channels) if len(track.labels) != 3 else None
    order = sorted(range(len(track.labels)), key=lambda i: _rank(track.labels[i]))
    permutation = tuple(order) if order != list(range(len(order))) else None
    return Operand((Piece(track.value, permutation, reshape),))


def _rank(label: Label) -> int:
    """Where an axis goes: batch, time, the channels in order, and axes of size one last."""
    return label if isinstance(label, int) else {"B": -2, "N": -2, "T": -1, "1": 1000}[label]


def convolutions(view: GraphView, roles: Roles) -> list[ShortConv] | Refusal | None:
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


def with_convolutions(
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
    allowed = {"silu", "trim", "sum", "max", "mul", "div", "repeat"}
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
    parameters["conv_weight"] = Parameter(
        tuple(c.weight for c in convs), lambda a: np.concatenate(a).astype(np.float32)
    )
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


def explained_nodes(view: GraphView, roles: Roles, tail: Tail | None) -> frozenset[ir.Node]:
    """The nodes of all steps that were recognised in closed form, and of the norm and gate behind the recurrence."""
    found: set[ir.Node] = set()
    for path in (roles.q, roles.k, roles.v, roles.g, roles.beta):
        for step in path.steps:
            found.update(_between(view, step.after.value, {step.before.value}))
    if tail is not None:
        start = {tail.o} | ({tail.gate} if tail.gate is not None else set())
        found.update(_between(view, tail.x, start))
    return frozenset(found)


def _between(view: GraphView, end: ir.Value, start: set[ir.Value]) -> list[ir.Node]:
    return backward(view, [end], lambda v: v in start or view.is_border(v)).nodes
