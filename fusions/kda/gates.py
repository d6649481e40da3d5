"""The forget gate and the update rate: activations and their constants, read off a path's steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from ..candidate import Parameter
from ..graph import GraphView
from ..track import Track
from .paths import Path, Step


def per_channel(array: np.ndarray, track: Track) -> np.ndarray | None:
    """A constant that is broadcast against a track's value, as float64 of shape ``track.factors``.

    None when it varies along batch or time.
    """
    rank = len(track.labels)
    if array.ndim > rank:
        extra = array.shape[: array.ndim - rank]
        if any(d != 1 for d in extra):
            return None
        array = array.reshape(array.shape[array.ndim - rank :])
    array = array.reshape((1,) * (rank - array.ndim) + array.shape).astype(np.float64)
    axes = [i for i, label in enumerate(track.labels) if isinstance(label, int)]
    if any(array.shape[i] != 1 for i in range(rank) if i not in axes):
        return None
    order = sorted(axes, key=lambda i: track.labels[i])
    flat = np.transpose(array, [*order, *(i for i in range(rank) if i not in axes)]).reshape(
        [array.shape[i] for i in order]
    )
    return np.broadcast_to(flat, track.factors)


@dataclass(frozen=True)
class ForgetGate:
    """A recognised forget gate. ``lower_bound`` is meaningful with the "sigmoid" activation only."""

    activation: str
    lower_bound: float
    a_log: Parameter
    dt_bias: Parameter | None


@dataclass(frozen=True)
class _Affine:
    """Per-channel slope and offset, built up from steps; ``None`` once they can't be."""

    slope: np.ndarray
    offset: np.ndarray


def _affine(steps: Sequence[Step], arrays: Sequence[np.ndarray], channels: int) -> _Affine | None:
    """x -> slope * x + offset of a run of add, mul and neg steps, over flat channels."""
    slope, offset = np.ones(channels), np.zeros(channels)
    supply = iter(arrays)
    for step in steps:
        if step.kind == "neg":
            slope, offset = -slope, -offset
            continue
        constant = per_channel(next(supply), step.before)
        if constant is None:
            return None
        flat = constant.reshape(-1)
        if step.kind == "add":
            offset = offset + flat
        elif step.kind == "div":
            slope, offset = slope / flat, offset / flat
        else:
            slope, offset = slope * flat, offset * flat
    return _Affine(slope, offset)


def forget_gate(view: GraphView, path: Path, num_v_heads: int) -> ForgetGate | None:
    """The gate ``lower_bound * sigmoid(A (x + dt_bias))`` or ``-A softplus(x + dt_bias)``, or None."""
    at = next((i for i, s in enumerate(path.steps) if s.kind in ("softplus", "sigmoid")), None)
    if at is None:
        return None
    inner, outer = path.steps[:at], path.steps[at + 1 :]
    linear = ("mul", "div", "neg")
    if any(s.kind not in ("add", *linear) for s in inner) or any(s.kind not in linear for s in outer):
        return None
    kind = path.steps[at].kind
    channels = path.end.channels
    if channels % num_v_heads:
        return None
    # the rate lies in the factors: before a sigmoid, behind a softplus
    rate_steps = [s for s in (outer if kind == "softplus" else inner) if s.kind != "add"]
    sign = -1.0 if kind == "softplus" else 1.0

    def rate(arrays: Sequence[np.ndarray]) -> np.ndarray | None:
        """log A per head, when A is positive and the same for a head's channels."""
        found = _affine(rate_steps, arrays, channels)
        if found is None:
            return None
        heads = (sign * found.slope).reshape(num_v_heads, -1)
        if not np.all(heads > 0) or not np.all(heads == heads[:, :1]):
            return None
        return np.log(heads[:, 0]).astype(np.float32)

    def bias(arrays: Sequence[np.ndarray]) -> np.ndarray | None:
        """What is added inside the activation, in units of x."""
        found = _affine(inner, arrays, channels)
        return None if found is None or not np.all(found.slope) else (found.offset / found.slope).astype(np.float32)

    inner_now = _affine(inner, _arrays(view, inner), channels)
    outer_now = _affine(outer, _arrays(view, outer), channels)
    if inner_now is None or outer_now is None or rate(_arrays(view, rate_steps)) is None:
        return None
    if kind == "softplus" and not np.all(inner_now.slope == 1.0):
        return None
    lower_bound = -5.0
    if kind == "sigmoid":
        bounds = outer_now.slope
        if not np.all(bounds == bounds[0]) or not bounds[0] < 0:
            return None
        lower_bound = float(bounds[0])
    has_bias = any(s.kind == "add" for s in inner)
    return ForgetGate(
        kind,
        lower_bound,
        Parameter(_sources(rate_steps), rate, positive=True),
        Parameter(_sources(inner), bias) if has_bias else None,
    )


def _sources(steps: Sequence[Step]) -> tuple[ir.Value, ...]:
    return tuple(s.constant for s in steps if s.constant is not None)


def _arrays(view: GraphView, steps: Sequence[Step]) -> list[np.ndarray]:
    return [a for s in _sources(steps) if (a := view.array(s)) is not None]


@dataclass(frozen=True)
class Rate:
    """A recognised update rate: ``scale * sigmoid(x)`` or ``scale * x``."""

    activation: str
    scale: float


def update_rate(view: GraphView, path: Path) -> Rate | None:
    """The rate's activation and factor, or None when the path has other steps."""
    activation, scale = "none", 1.0
    for step in path.steps:
        if step.kind == "sigmoid" and activation == "none" and scale == 1.0:
            activation = "sigmoid"
        elif step.kind == "mul" and (factor := view.scalar(step.constant)) is not None:
            scale *= factor
        else:
            return None
    return Rate(activation, scale)
