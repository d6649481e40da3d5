"""Where the channels of a border value go: a value followed through reshapes, transposes and splits.

A track knows, for the value that it stands at, which axis is batch, which is time and which make up the channels, and
which range of the border's channels those are.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from .graph import GraphView, attribute_int, attribute_ints, is_op, static_dims

#: An axis: "B" batch, "T" time, "N" batch and time in one, "1" of size one, or the index of a channel factor.
Label = str | int


@dataclass(frozen=True)
class Track:
    """A value reached from ``border`` by moving data only (and elementwise steps that others recognised)."""

    border: ir.Value
    value: ir.Value
    labels: tuple[Label, ...]
    factors: tuple[int, ...]  # sizes of the channel axes, major to minor
    low: int  # the first of the border's channels that is here

    @property
    def channels(self) -> int:
        return int(np.prod(self.factors))

    @property
    def high(self) -> int:
        return self.low + self.channels

    def at(self, value: ir.Value) -> Track:
        """The same place in another value, after an elementwise step."""
        return replace(self, value=value)


def moves(view: GraphView, track: Track, node: ir.Node) -> list[Track]:
    """The tracks after a data-moving node; empty when the node does something else or the track loses its way."""
    if not node.inputs or node.inputs[0] is not track.value:
        return []
    if is_op(node, "Cast", "Identity"):
        return [track.at(node.outputs[0])]
    if is_op(node, "Transpose"):
        permutation = attribute_ints(node, "perm") or list(range(len(track.labels)))[::-1]
        return [replace(track, value=node.outputs[0], labels=tuple(track.labels[i] for i in permutation))]
    if is_op(node, "Reshape"):
        moved = _reshape(view, track, node)
        return [] if moved is None else [moved]
    if is_op(node, "Split"):
        return _split(view, track, node)
    if is_op(node, "Slice"):
        moved = _slice(view, track, node)
        return [] if moved is None else [moved]
    if is_op(node, "Unsqueeze"):
        return _unsqueeze(view, track, node)
    if is_op(node, "Squeeze"):
        return _squeeze(view, track, node)
    if is_op(node, "Gather"):
        return _gather(view, track, node)
    return []


def _target(view: GraphView, node: ir.Node) -> list[int | None] | None:
    """A Reshape's result dims from the right, None where unknown."""
    constant = view.ints(node.inputs[1])
    known = static_dims(node.outputs[0])
    if constant is None:
        return known
    dims: list[int | None] = [d if d > 0 else None for d in constant]
    if known is not None and len(known) == len(dims):
        dims = [d if d is not None else k for d, k in zip(dims, known, strict=True)]
    return dims


def _reshape(view: GraphView, track: Track, node: ir.Node) -> Track | None:
    target = _target(view, node)
    plain = [label for label in track.labels if label != "1"]
    channels = [label for label in plain if isinstance(label, int)]
    if target is None or channels != sorted(channels) or not channels:
        return None
    # the channels must be neighbours, in order: anything else mixes them with time
    first = plain.index(channels[0])
    left, right = plain[:first], plain[first + len(channels) :]
    if plain != [*left, *channels, *right] or any(isinstance(label, int) for label in right):
        return None
    rest = list(target)
    tail = [rest.pop() for _ in right] if len(rest) >= len(right) else []
    if len(tail) != len(right):
        return None
    want, product, sizes = track.channels, 1, []
    while rest and product < want:
        size = rest.pop()
        if size is None:
            if want % product:
                return None
            size = want // product  # the one unknown dim takes what is left of the channels
        product *= size
        sizes.append(size)
    if product != want:
        return None
    ones = 0
    while len(rest) > max(len(left), 2 if left == ["N"] else 0) and rest[-1] == 1:
        rest.pop()
        ones += 1
    outer: list[Label]
    if len(rest) == len(left):
        outer = list(left)
    elif left == ["N"] and len(rest) == 2:
        outer = ["B", "T"]
    elif left == ["B", "T"] and len(rest) == 1:
        outer = ["N"]
    else:
        return None
    factors = tuple(reversed(sizes))
    labels = (*outer, *("1",) * ones, *range(len(factors)), *right)
    return replace(track, value=node.outputs[0], labels=labels, factors=factors)


def _leading(track: Track, axis: int) -> bool:
    """Is this axis the major one of the channels, so that a range of it is a range of channels?"""
    label = track.labels[axis]
    return label == 0 or (isinstance(label, int) and all(f == 1 for f in track.factors[:label]))


def _narrow(track: Track, value: ir.Value, axis: int, start: int, size: int) -> Track:
    label = track.labels[axis]
    assert isinstance(label, int)
    inner = int(np.prod(track.factors[label + 1 :]))
    factors = (*track.factors[:label], size, *track.factors[label + 1 :])
    return replace(track, value=value, factors=factors, low=track.low + start * inner)


def _split(view: GraphView, track: Track, node: ir.Node) -> list[Track]:
    axis = attribute_int(node, "axis", 0) % len(track.labels)
    if not _leading(track, axis):
        return []
    label = track.labels[axis]
    assert isinstance(label, int)
    sizes = view.ints(node.inputs[1]) if len(node.inputs) > 1 else None
    if sizes is None:
        count = len(node.outputs)
        each = -(-track.factors[label] // count)
        sizes = [each] * (count - 1) + [track.factors[label] - each * (count - 1)]
    found, start = [], 0
    for value, size in zip(node.outputs, sizes, strict=False):
        found.append(_narrow(track, value, axis, start, size))
        start += size
    return found


def _slice(view: GraphView, track: Track, node: ir.Node) -> Track | None:
    starts, ends, axes = (view.ints(v) for v in (*node.inputs[1:3], node.inputs[3] if len(node.inputs) > 3 else None))
    steps = view.ints(node.inputs[4]) if len(node.inputs) > 4 and node.inputs[4] is not None else [1]
    if starts is None or ends is None or axes is None or len(starts) != 1 or steps != [1]:
        return None
    axis = axes[0] % len(track.labels)
    if not _leading(track, axis):
        return None
    label = track.labels[axis]
    assert isinstance(label, int)
    size = track.factors[label]
    start, end = (max(0, i + size) if i < 0 else min(i, size) for i in (starts[0], ends[0]))
    return _narrow(track, node.outputs[0], axis, start, end - start) if end > start else None


def _is_one_token(track: Track, axis: int) -> bool:
    """Is this the time axis of a graph that is frozen at one token? Such graphs drop it on the way."""
    dims = static_dims(track.value)
    return track.labels[axis] == "T" and dims is not None and dims[axis] == 1


def _unsqueeze(view: GraphView, track: Track, node: ir.Node) -> list[Track]:
    axes = view.ints(node.inputs[1]) if len(node.inputs) > 1 else None
    if axes is None:
        return []
    rank = len(track.labels) + len(axes)
    where = {a % rank for a in axes}
    rest = iter(track.labels)
    return [replace(track, value=node.outputs[0], labels=tuple("1" if i in where else next(rest) for i in range(rank)))]


def _squeeze(view: GraphView, track: Track, node: ir.Node) -> list[Track]:
    axes = view.ints(node.inputs[1]) if len(node.inputs) > 1 else None
    if axes is None:
        return []
    where = {a % len(track.labels) for a in axes}
    if any(track.labels[i] != "1" and not _is_one_token(track, i) for i in where):
        return []
    return [
        replace(track, value=node.outputs[0], labels=tuple(x for i, x in enumerate(track.labels) if i not in where))
    ]


def _gather(view: GraphView, track: Track, node: ir.Node) -> list[Track]:
    """One index of the major channel axis, as ``unbind`` leaves it."""
    index = view.array(node.inputs[1])
    axis = attribute_int(node, "axis", 0) % len(track.labels)
    label = track.labels[axis]
    if index is None or index.ndim != 0:
        return []
    if _is_one_token(track, axis):
        rest = tuple(x for i, x in enumerate(track.labels) if i != axis)
        return [replace(track, value=node.outputs[0], labels=rest)]
    if not isinstance(label, int) or not _leading(track, axis):
        return []
    size = track.factors[label]
    narrowed = _narrow(track, node.outputs[0], axis, int(index) % size, 1)
    labels = tuple(
        (x - 1 if isinstance(x, int) and x > label else x) for i, x in enumerate(narrowed.labels) if i != axis
    )
    factors = narrowed.factors[:label] + narrowed.factors[label + 1 :]
    return [replace(narrowed, labels=labels, factors=factors)]
