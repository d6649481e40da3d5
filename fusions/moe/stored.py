"""Constant weights as they are stored, seen through transposes, splits, slices, stacking and `DequantizeLinear`."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from ..graph import FLOAT_TYPES, GraphView, attribute_int, attribute_ints, is_op, static_dims

HALF = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
#: The axis along which several stored tensors are stacked.
STACKED = -1
Arrays = dict[ir.Value, np.ndarray]


@dataclass(frozen=True)
class Quantized:
    """How numbers are stored: ``(stored - zero) * scale``, as `DequantizeLinear` has it."""

    scale: ir.Value
    zero: ir.Value | None
    axis: int  # of the stored tensor
    block: int  # 0: not blocked


@dataclass(frozen=True)
class Part:
    """One stored tensor and the indices that are seen along its axes (all, where an axis is not named)."""

    source: ir.Value
    picks: tuple[tuple[int, tuple[int, ...]], ...] = ()
    quantized: Quantized | None = None

    def pick(self, axis: int, indices: list[int]) -> Part:
        """See only these of the indices that are seen along an axis."""
        known = dict(self.picks)
        old = known.get(axis)
        known[axis] = tuple(indices if old is None else (old[i] for i in indices))
        return replace(self, picks=tuple(sorted(known.items())))

    def size(self, axis: int) -> int:
        dims = static_dims(self.source) or []
        chosen = dict(self.picks).get(axis)
        return len(chosen) if chosen is not None else int(dims[axis] or 0)


@dataclass(frozen=True)
class Seen:
    """A constant: which axis of the stored tensors each of its axes is (STACKED, or None for an inserted one)."""

    parts: tuple[Part, ...]
    axes: tuple[int | None, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        first = self.parts[0]
        return tuple(1 if a is None else len(self.parts) if a == STACKED else first.size(a) for a in self.axes)

    @property
    def quantized(self) -> bool:
        return self.parts[0].quantized is not None

    def values(self) -> list[ir.Value]:
        """The stored tensors, without scales and zero points."""
        return [p.source for p in self.parts]

    def at(self, axis: int, indices: list[int]) -> Seen:
        """Only these indices of one of its axes."""
        where = self.axes[axis]
        if where is None:
            return self
        if where == STACKED:
            return replace(self, parts=tuple(self.parts[i] for i in indices))
        return replace(self, parts=tuple(p.pick(where, indices) for p in self.parts))

    def without(self, axis: int) -> Seen:
        """One axis of size one dropped."""
        return replace(self, axes=tuple(a for i, a in enumerate(self.axes) if i != axis))


def see(view: GraphView, value: ir.Value | None) -> Seen | None:
    """What a constant value is of the stored tensors behind it; None where that is more than moving data."""
    if value is None or not view.is_const(value):
        return None
    producer = value.producer()
    if producer is None:
        dims = static_dims(value)
        return None if dims is None or None in dims else Seen((Part(value),), tuple(range(len(dims))))
    if is_op(producer, "DequantizeLinear"):
        return _dequantized(view, producer)
    if is_op(producer, "Concat"):
        return _stacked(view, producer)
    inner = see(view, producer.inputs[0])
    if inner is None or not is_op(producer, *_STEPS):
        return None
    return _STEPS[producer.op_type](view, producer, inner, value)


def _dequantized(view: GraphView, node: ir.Node) -> Seen | None:
    inner = see(view, node.inputs[0])
    if inner is None or len(inner.parts) != 1 or inner.parts[0] != Part(inner.parts[0].source):
        return None
    if inner.axes != tuple(range(len(inner.axes))):
        return None
    zero = node.inputs[2] if len(node.inputs) > 2 else None
    scale = node.inputs[1]
    if scale is None or not view.is_const(scale) or (zero is not None and not view.is_const(zero)):
        return None
    rank = len(inner.axes)
    axis, block = attribute_int(node, "axis", 1) % rank, attribute_int(node, "block_size", 0)
    return replace(inner, parts=(replace(inner.parts[0], quantized=Quantized(scale, zero, axis, block)),))


def _stacked(view: GraphView, node: ir.Node) -> Seen | None:
    """A `Concat` of constants that each have an inserted axis there: what ``torch.stack`` leaves."""
    found = [see(view, v) for v in node.inputs]
    first = found[0]
    if first is None or any(f is None or f.axes != first.axes or f.shape != first.shape for f in found):
        return None
    if any(f is not None and f.quantized != first.quantized for f in found):
        return None
    axis = attribute_int(node, "axis", 0) % len(first.axes)
    if first.axes[axis] is not None or STACKED in first.axes:
        return None
    axes = tuple(STACKED if i == axis else a for i, a in enumerate(first.axes))
    return Seen(tuple(f.parts[0] for f in found if f is not None), axes)


def _transpose(view: GraphView, node: ir.Node, inner: Seen, value: ir.Value) -> Seen | None:
    order = attribute_ints(node, "perm") or list(range(len(inner.axes)))[::-1]
    return replace(inner, axes=tuple(inner.axes[i] for i in order))


def _unsqueeze(view: GraphView, node: ir.Node, inner: Seen, value: ir.Value) -> Seen | None:
    axes = attribute_ints(node, "axes") or (view.ints(node.inputs[1]) if len(node.inputs) > 1 else None)
    if axes is None:
        return None
    rank = len(inner.axes) + len(axes)
    where = {a % rank for a in axes}
    rest = iter(inner.axes)
    return replace(inner, axes=tuple(None if i in where else next(rest) for i in range(rank)))


def _squeeze(view: GraphView, node: ir.Node, inner: Seen, value: ir.Value) -> Seen | None:
    axes = attribute_ints(node, "axes") or (view.ints(node.inputs[1]) if len(node.inputs) > 1 else None)
    if axes is None:
        axes = [i for i, size in enumerate(inner.shape) if size == 1]
    where = {a % len(inner.axes) for a in axes}
    return replace(inner, axes=tuple(a for i, a in enumerate(inner.axes) if i not in where))


def _split(view: GraphView, node: ir.Node, inner: Seen, value: ir.Value) -> Seen | None:
    axis = attribute_int(node, "axis", 0) % len(inner.axes)
    whole, count = inner.shape[axis], len(node.outputs)
    sizes = view.ints(node.inputs[1]) if len(node.inputs) > 1 and node.inputs[1] is not None else None
    if sizes is None:
        each = -(-whole // count)
        sizes = [each] * (count - 1) + [whole - each * (count - 1)]
    place = next(i for i, v in enumerate(node.outputs) if v is value)
    start = sum(sizes[:place])
    return inner.at(axis, list(range(start, start + sizes[place])))


def slice_of(view: GraphView, node: ir.Node, shape: tuple[int, ...]) -> tuple[int, list[int]] | None:
    """(axis, indices) of a `Slice` along one axis, from its input's shape."""
    given = [view.ints(v) if v is not None else None for v in node.inputs[1:]]
    if len(given) < 2 or given[0] is None or given[1] is None or len(given[0]) != 1:
        return None
    axes = given[2] if len(given) > 2 and given[2] is not None else [0]
    steps = given[3] if len(given) > 3 and given[3] is not None else [1]
    axis = axes[0] % len(shape)
    if steps[0] < 1:
        return None
    return axis, list(range(shape[axis]))[given[0][0] : given[1][0] : steps[0]]


def _slice(view: GraphView, node: ir.Node, inner: Seen, value: ir.Value) -> Seen | None:
    found = slice_of(view, node, inner.shape)
    return None if found is None or not found[1] else inner.at(*found)


def _gather(view: GraphView, node: ir.Node, inner: Seen, value: ir.Value) -> Seen | None:
    index = view.array(node.inputs[1])
    axis = attribute_int(node, "axis", 0) % len(inner.axes)
    if index is None or index.ndim > 1:
        return None
    size = inner.shape[axis]
    chosen = inner.at(axis, [int(i) % size for i in index.reshape(-1)])
    return chosen if index.ndim == 1 else chosen.without(axis)


def _reshape(view: GraphView, node: ir.Node, inner: Seen, value: ir.Value) -> Seen | None:
    """Axes of size one come or go."""
    dims = static_dims(value)
    if dims is None or [d for d in dims if d != 1] != [s for s in inner.shape if s != 1]:
        return None
    rest = iter(a for a, s in zip(inner.axes, inner.shape, strict=True) if s != 1)
    return replace(inner, axes=tuple(None if d == 1 else next(rest) for d in dims))


def _same(view: GraphView, node: ir.Node, inner: Seen, value: ir.Value) -> Seen | None:
    return inner


def _cast(view: GraphView, node: ir.Node, inner: Seen, value: ir.Value) -> Seen | None:
    """Between float types only: integers that become floats are no weights as they stand. Nor are numbers that lose
    digits on their way to a type that could hold them."""
    source = node.inputs[0]
    if source is None or not {source.dtype, value.dtype} <= FLOAT_TYPES:
        return None
    return None if rounded(inner, source, value) else inner


def rounded(seen: Seen, source: ir.Value, value: ir.Value) -> bool:
    """Does a cast from ``source`` to ``value`` widen what was stored with more digits than it has there?"""
    stored = {part.source.dtype for part in seen.parts if part.quantized is None}
    return source.dtype in HALF and value.dtype not in HALF and not stored <= {source.dtype}


_STEPS = {
    "Cast": _cast,
    "Gather": _gather,
    "Identity": _same,
    "Reshape": _reshape,
    "Slice": _slice,
    "Split": _split,
    "Squeeze": _squeeze,
    "Transpose": _transpose,
    "Unsqueeze": _unsqueeze,
}
