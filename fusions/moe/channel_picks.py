"""Rules for channels where a node takes or writes some of what a value has: slices, splits, gathers, scatters."""

from __future__ import annotations

import onnx_ir as ir
from onnx import helper

from ..graph import attribute_int, rank_of, static_dims
from ..proof.spread import HeadsMix
from .channel_writer import ChannelWriter, Kept, Kinds
from .stored import slice_of


class ChannelPicks(ChannelWriter):
    """One rule for each operator, as in ``channels.py``."""

    def _split(self, node: ir.Node) -> None:
        source = node.inputs[0]
        assert source is not None
        axis = attribute_int(node, "axis", 0) % (rank_of(source) or 1)
        kinds = self.kinds[source]
        sizes = self.view.ints(node.inputs[1]) if len(node.inputs) > 1 and node.inputs[1] is not None else None
        rest = {a: k for a, k in kinds.items() if a != axis}
        if axis not in kinds:
            for value in node.outputs:
                self.kinds[value] = dict(rest)
            self._write(node)
            return
        kept, count = kinds[axis], len(node.outputs)
        if sizes is None:
            each = -(-kept.size // count)
            sizes = [each] * (count - 1) + [kept.size - each * (count - 1)]
        start, lengths = 0, []
        for value, size in zip(node.outputs, sizes, strict=True):
            inside = tuple(i - start for i in kept.indices if start <= i < start + size)
            self.kinds[value] = {**rest, axis: Kept(inside, size)}
            lengths.append(len(inside))
            start += size
        self._write(node, {1: self._ints(lengths)}, drop=("num_outputs", "split"))

    def _slice(self, node: ir.Node) -> None:
        source = node.inputs[0]
        assert source is not None
        dims = static_dims(source)
        if dims is None:
            raise HeadsMix(f"the shape of {node.name!r} is not known")
        found = slice_of(self.view, node, tuple(-1 if d is None else d for d in dims))
        kinds = self.kinds[source]
        if found is None:
            if not self._takes_all(node, kinds):
                raise HeadsMix(f"{node.name!r} cuts along computed positions")
            self.kinds[node.outputs[0]] = dict(kinds)
            self._write(node)
            return
        axis, indices = found
        if axis not in kinds:
            self.kinds[node.outputs[0]] = dict(kinds)
            self._write(node)
            return
        self._pick(node, source, axis, indices)

    def _takes_all(self, node: ir.Node, kinds: Kinds) -> bool:
        """Does a slice of several axes leave the channels whole: from the first to the last one, or to as many as
        another value has?"""
        starts, ends, axes, steps = [*node.inputs[1:], None, None][:4]
        begin = None if starts is None else self.view.ints(starts)
        if begin is None:
            return False
        each = [None if v is None else self.view.ints(v) for v in (ends, axes, steps)]
        stop: list[int | None] | None = list(each[0]) if each[0] is not None else None
        size = None if ends is None else ends.producer()
        if stop is None and size is not None and size.op_type == "Shape" and not size.attributes:
            dims = None if size.inputs[0] is None else static_dims(size.inputs[0])
            stop = None if dims is None else list(dims)
        rank = rank_of(node.inputs[0]) if node.inputs[0] is not None else None
        if stop is None or rank is None or len(stop) != len(begin) or set(each[2] or [1]) != {1}:
            return False
        places = [a % rank for a in each[1]] if each[1] is not None else list(range(len(begin)))
        for axis, first, last in zip(places, begin, stop, strict=True):
            if axis in kinds and (first != 0 or last is None or last < kinds[axis].size):
                return False
        return True

    def _pick(self, node: ir.Node, source: ir.Value, axis: int, indices: list[int]) -> None:
        """Indices of the channels' axis: those that stay, by their new numbers."""
        kinds = self.kinds[source]
        place = {index: i for i, index in enumerate(kinds[axis].indices)}
        left = [i for i, index in enumerate(indices) if index in place]
        rest = {a: k for a, k in kinds.items() if a != axis}
        self.kinds[node.outputs[0]] = {**rest, axis: Kept(tuple(left), len(indices))}
        numbers = self._ints(place[indices[i]] for i in left)
        names = [source.name or "", numbers]
        self.protos.append(helper.make_node("Gather", names, [node.outputs[0].name or ""], axis=axis))

    def _gather(self, node: ir.Node) -> None:
        data, index = node.inputs
        assert data is not None
        assert index is not None
        rank, width = rank_of(data), rank_of(index)
        if rank is None or width is None or self.kinds.get(index):
            raise HeadsMix(f"the rank of an operand of {node.name!r} is not known")
        axis, kinds = attribute_int(node, "axis", 0) % rank, self.kinds[data]
        if axis in kinds:
            numbers = self.view.array(index)
            if numbers is None or numbers.ndim != 1:
                raise HeadsMix(f"{node.name!r} picks single channels")
            self._pick(node, data, axis, [int(i) % kinds[axis].size for i in numbers])
            return
        self.kinds[node.outputs[0]] = {a if a < axis else a + width - 1: k for a, k in kinds.items()}
        self._write(node)

    def _gathernd(self, node: ir.Node) -> None:
        data, index = node.inputs
        assert data is not None
        self.kinds[node.outputs[0]] = self._after_index(node, data, index)
        self._write(node)

    def _after_index(self, node: ir.Node, data: ir.Value, index: ir.Value | None) -> Kinds:
        """Where the channels of indexed data are in what is read or written there."""
        dims = None if index is None else static_dims(index)
        if dims is None or dims[-1] is None or attribute_int(node, "batch_dims", 0):
            raise HeadsMix(f"the shape of the index of {node.name!r} is not known")
        deep = dims[-1]
        kinds = self.kinds.get(data, {})
        if any(a < deep for a in kinds):
            raise HeadsMix(f"{node.name!r} picks single channels")
        return {a - deep + len(dims) - 1: k for a, k in kinds.items()}

    def _scatternd(self, node: ir.Node) -> None:
        data, index, updates = node.inputs
        assert data is not None
        assert updates is not None
        dims = None if index is None else static_dims(index)
        rank = rank_of(data)
        if dims is None or dims[-1] is None or rank is None:
            raise HeadsMix(f"the shape of the index of {node.name!r} is not known")
        shift = len(dims) - 1 - dims[-1]
        kinds = {**self.kinds.get(data, {}), **{a - shift: k for a, k in self.kinds.get(updates, {}).items()}}
        if any(a < dims[-1] for a in kinds) or len(kinds) > 1:
            raise HeadsMix(f"{node.name!r} picks single channels")
        names = {}
        for axis, kept in kinds.items():
            names = {0: self._want(data, axis, kept), 2: self._want(updates, axis + shift, kept)}
        self.kinds[node.outputs[0]] = kinds
        self._write(node, names)

    def _scatterelements(self, node: ir.Node) -> None:
        data = node.inputs[0]
        assert data is not None
        axis = attribute_int(node, "axis", 0) % max(rank_of(data) or 0, 1)
        kinds: Kinds = {}
        for value in node.inputs:
            kinds |= self.kinds.get(value, {})  # type: ignore[arg-type]
        if axis in kinds or len(kinds) > 1:
            raise HeadsMix(f"{node.name!r} picks single channels")
        names = {}
        for place, value in enumerate(node.inputs):
            for at, kept in kinds.items():
                assert value is not None
                names[place] = self._want(value, at, kept)
        self.kinds[node.outputs[0]] = kinds
        self._write(node, names)

    _gatherelements = _scatterelements
