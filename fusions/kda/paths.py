"""From a border value towards the recurrence: what elementwise steps lie on the way, each recognised on its own."""

from __future__ import annotations

from dataclasses import dataclass, field

import onnx_ir as ir

from ..graph import FLOAT_TYPES, GraphView, is_op, rank_of, static_dims
from ..match import Norm, match_norm, match_silu, match_softplus
from ..region import Region
from ..track import Label, Track, moves


@dataclass(frozen=True)
class Step:
    """One elementwise step. kind: "silu", "softplus", "sigmoid", "neg", "add", "mul", "sum", "max" (L2 norms) or
    "trim" (time cut after a padded convolution). ``before`` is the track that the step read."""

    kind: str
    before: Track
    after: Track
    constant: ir.Value | None = None
    epsilon: float = 0.0


@dataclass(frozen=True)
class Path:
    """All steps from a border to the last value that was understood."""

    border: ir.Value
    end: Track
    steps: tuple[Step, ...] = field(default_factory=tuple)
    trail: tuple[Track, ...] = field(default_factory=tuple)  # every value on the way

    def source(self, track: Track) -> Track:
        """The earliest place with the contents of ``track``: before the moves that led there, behind the last step.

        Places that have lost their batch or time axis are passed over.
        """
        at = next((i for i, t in enumerate(self.trail) if t.value is track.value), None)
        if at is None:
            return track
        after = {s.after.value for s in self.steps}
        found = track
        for i in range(at, -1, -1):
            place = self.trail[i]
            if (place.low, place.channels) != (track.low, track.channels):
                break
            if {"B", "T"} <= set(place.labels):
                found = place
            if place.value in after:
                break
        return found

    def kinds(self) -> tuple[str, ...]:
        return tuple(s.kind for s in self.steps)

    @property
    def channels(self) -> int:
        """Channels of the operand: before heads were repeated for grouped values."""
        repeat = next((s for s in self.steps if s.kind == "repeat"), None)
        return self.end.channels if repeat is None else repeat.before.channels

    def norm(self) -> Step | None:
        """The L2 norm, if there is one."""
        return next((s for s in self.steps if s.kind in ("sum", "max")), None)


def start_track(view: GraphView, border: ir.Value) -> Track | None:
    """How a border's axes lie before anything moved them, or None when it can't be a sequence of channels."""
    producer = border.producer()
    dims = border.shape
    rank = rank_of(border)
    if border.dtype is not None and border.dtype not in FLOAT_TYPES:
        return None
    if producer is not None and view.is_depthwise(producer):
        weight = producer.inputs[1]
        assert weight is not None and weight.shape is not None
        channels = weight.shape[0]
        last = _channels_last(producer)
        labels: tuple[Label, ...] = ("B", "T", 0) if last else ("B", 0, "T")
        return Track(border, border, labels, (int(channels),), 0) if isinstance(channels, int) else None
    weight = None if producer is None else view.weight_of(producer)
    if weight is not None and producer is not None and rank is None:
        rank = 2 if is_op(producer, "Gemm") else 3
    if rank is None or rank < 2 or rank > 4:
        return None
    channel = _last_channels(view, border, weight)
    if channel is None:
        return None
    if rank == 2:
        return Track(border, border, ("N", 0), (channel,), 0)
    if rank == 3:
        return Track(border, border, ("B", "T", 0), (channel,), 0)
    heads = dims[2] if dims is not None else None
    if not isinstance(heads, int):
        return None
    return Track(border, border, ("B", "T", 0, 1), (heads, channel), 0)


def _channels_last(conv: ir.Node) -> bool:
    return "channels_last" in conv.attributes and conv.attributes["channels_last"].as_int() == 1


def _last_channels(view: GraphView, border: ir.Value, weight: ir.Value | None) -> int | None:
    if border.shape is not None and isinstance(border.shape[-1], int):
        return border.shape[-1]
    if weight is None or weight.shape is None:
        return None
    producer = border.producer()
    transposed = (
        producer is not None and "transB" in producer.attributes and producer.attributes["transB"].as_int() == 1
    )
    size = weight.shape[0 if transposed else 1]
    return size if isinstance(size, int) else None


def paths_from(view: GraphView, region: Region, border: ir.Value) -> list[Path]:
    """Every path from a border; a `Split` makes several."""
    start = start_track(view, border)
    if start is None:
        return []
    done: list[Path] = []
    stack = [Path(border, start, (), (start,))]
    while stack:
        path = stack.pop()
        following = _next(view, region, path)
        if not following:
            done.append(path)
        stack.extend(reversed(following))
        if len(done) > 64:
            break
    # a fork that only moves data makes several paths of the same channels: the one that was understood furthest stays
    best: dict[tuple[int, int], Path] = {}
    for path in done:
        key = (path.end.low, path.end.low + path.channels)
        if key not in best or len(path.steps) > len(best[key].steps):
            best[key] = path
    return list(best.values())


def _next(view: GraphView, region: Region, path: Path) -> list[Path]:
    track = path.end
    users = [u for u in view.users(track.value) if u in region and not is_op(u, "Shape")]
    if not users:
        return []
    block = _block(view, region, track, users)
    if block is not None:
        return [_stepped(path, block)]
    moved = [t for u in users for t in moves(view, track, u)]
    if moved and all(moves(view, track, u) for u in users):
        useful = [t for t in moved if any(u in region for u in view.users(t.value))]
        return [Path(path.border, t, path.steps, (*path.trail, t)) for t in useful]
    if len(users) != 1:
        return []
    repeat = _repeat(view, track, users[0])
    if repeat is not None:
        return [_stepped(path, repeat)]
    step = _single(view, track, users[0])
    return [] if step is None else [_stepped(path, step)]


def _stepped(path: Path, step: Step) -> Path:
    return Path(path.border, step.after, (*path.steps, step), (*path.trail, step.after))


def _block(view: GraphView, region: Region, track: Track, users: list[ir.Node]) -> Step | None:
    """A block of several nodes that reads the value more than once: SiLU, softplus, an L2 norm."""
    for node in _reach(view, region, users):
        if match_silu(view, node) is track.value:
            kind, epsilon = "silu", 0.0
        elif match_softplus(view, node) is track.value:
            kind, epsilon = "softplus", 0.0
        else:
            norm = match_norm(view, node)
            if norm is None or norm.kind not in ("sum", "max") or not _starts_at(norm, track.value):
                continue
            moved = _follow(view, track, norm.numerator)
            if moved is None or track.labels[norm.axis % len(track.labels)] != len(track.factors) - 1:
                continue
            return Step(norm.kind, track, moved.at(node.outputs[0]), epsilon=norm.epsilon)
        if kind == "softplus" and _larger_softplus(view, region, node, track.value) is not None:
            node = _larger_softplus(view, region, node, track.value)  # type: ignore[assignment]
        after = track.at(node.outputs[0])
        return Step(kind, track, after, epsilon=epsilon)
    return None


def _starts_at(norm: Norm, value: ir.Value) -> bool:
    """Does the norm take this value in, for its squares or for its numerator?"""
    return norm.x is value or norm.numerator is value


def _follow(view: GraphView, track: Track, end: ir.Value) -> Track | None:
    """The track at ``end``, which transposes and casts alone separate from where it stands."""
    chain: list[ir.Node] = []
    value = end
    while value is not track.value:
        producer = value.producer()
        if not is_op(producer, "Transpose", "Cast", "Identity") or producer is None or producer.inputs[0] is None:
            return None
        chain.append(producer)
        value = producer.inputs[0]
    for node in reversed(chain):
        track = moves(view, track, node)[0]
    return track


def _larger_softplus(view: GraphView, region: Region, node: ir.Node, x: ir.Value) -> ir.Node | None:
    """The `Where` around a softplus, which takes the linear branch above a threshold."""
    for user in view.users(node.outputs[0]):
        if user in region and match_softplus(view, user) is x:
            return user
    return None


def _reach(view: GraphView, region: Region, users: list[ir.Node], depth: int = 7) -> list[ir.Node]:
    """Nodes a few steps on, nearest first: where a small block that starts here can end."""
    found: dict[ir.Node, None] = {}
    level = users
    for _ in range(depth):
        following: list[ir.Node] = []
        for node in level:
            if node in found or node not in region:
                continue
            found[node] = None
            if len(found) > 48:
                return list(found)
            if is_op(node, "Reshape", "Pad", "Exp", "CumSum", "Scan", "Loop") and not is_op(node, "Exp"):
                continue
            for value in node.outputs:
                following.extend(view.users(value))
        level = following
    return list(found)


def _repeat(view: GraphView, track: Track, node: ir.Node) -> Step | None:
    """Heads repeated for grouped values: `Unsqueeze Expand Reshape`, as ``repeat_interleave`` leaves it."""
    if not is_op(node, "Expand") or "1" not in track.labels or len(track.factors) != 2:
        return None
    users = [u for u in view.users(node.outputs[0]) if not is_op(u, "Shape")]
    if len(users) != 1 or not is_op(users[0], "Reshape"):
        return None
    at = track.labels.index("1")
    if at == 0 or track.labels[at - 1] != 0:
        return None
    labels = tuple(x for i, x in enumerate(track.labels) if i != at)
    value = users[0].outputs[0]
    dims = static_dims(value)
    heads = dims[labels.index(0)] if dims is not None and len(dims) == len(labels) else None
    if heads is None or heads % track.factors[0]:
        return None
    return Step("repeat", track, Track(track.border, value, labels, (heads, track.factors[1]), track.low))


def _single(view: GraphView, track: Track, node: ir.Node) -> Step | None:
    """One node with one data input: an activation, a sign, a constant added or multiplied."""
    if not node.outputs:
        return None
    after = track.at(node.outputs[0])
    if is_op(node, "Sigmoid"):
        return Step("sigmoid", track, after)
    if is_op(node, "Softplus"):
        return Step("softplus", track, after)
    if is_op(node, "Neg"):
        return Step("neg", track, after)
    if is_op(node, "Slice") and _is_time_trim(view, track, node):
        return Step("trim", track, after)
    if is_op(node, "Div") and node.inputs[0] is track.value:
        below = node.inputs[1]
        if below is not None and view.is_const(below) and view.array(below) is not None:
            return Step("div", track, after, constant=below)
    if is_op(node, "Add", "Mul") and len(node.inputs) == 2:
        other = node.inputs[1] if node.inputs[0] is track.value else node.inputs[0]
        if other is not None and view.is_const(other) and view.array(other) is not None:
            return Step(node.op_type.lower(), track, after, constant=other)
    return None


def _is_time_trim(view: GraphView, track: Track, node: ir.Node) -> bool:
    """A cut of the time axis behind a convolution (its padding, or the tokens of a carried state)."""
    producer = track.border.producer()
    if producer is None or not view.is_depthwise(producer) or len(node.inputs) < 4:
        return False
    axes = view.ints(node.inputs[3])
    return axes is not None and len(axes) == 1 and track.labels[axes[0] % len(track.labels)] == "T"
