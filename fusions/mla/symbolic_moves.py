"""Values in closed form: moves, cuts and look-ups."""

from __future__ import annotations

import onnx_ir as ir

from ..graph import attribute_int, attribute_ints, is_op
from .elements import (
    Element,
    Tensor,
    Unknown,
    Vec,
    bound,
    broadcast,
    choose,
    even,
    fitting,
    map_leaves,
    number_of,
    place,
    put,
    truth,
)
from .linear import Cond, Lin, axis, of_dim
from .symbolic_base import Evaluator


class Moves(Evaluator):
    """Nodes that move elements about."""

    def _on_identity(self, node: ir.Node) -> Tensor:
        return self(node.inputs[0])

    def _on_cast(self, node: ir.Node) -> Tensor:
        source = self(node.inputs[0])
        to = ir.DataType(node.attributes["to"].as_int())
        if isinstance(source.element, Vec):
            return Tensor(source.shape, Vec(tuple(fitting(item, to) for item in source.element.items)))
        if to == ir.DataType.BOOL:
            return Tensor(source.shape, truth(source.element))
        if isinstance(source.element, Cond):
            return Tensor(source.shape, choose(source.element, Lin(1), Lin(0)))
        return Tensor(source.shape, map_leaves(source.element, lambda x: fitting(x, to)))

    def _on_unsqueeze(self, node: ir.Node) -> Tensor:
        source = self(node.inputs[0])
        rank = len(source.shape) + len(axes := self.view.ints(node.inputs[1]) or [])
        new = {a % rank for a in axes}
        rest = iter(range(len(source.shape)))
        return self._placed(source, [None if i in new else next(rest) for i in range(rank)])

    def _on_squeeze(self, node: ir.Node) -> Tensor:
        source = self(node.inputs[0])
        rank = len(source.shape)
        if len(node.inputs) > 1 and node.inputs[1] is not None:
            gone = {a % rank for a in self.view.ints(node.inputs[1]) or []}
        else:
            gone = {i for i, d in enumerate(source.shape) if d.number == 1}
        return self._placed(source, [i for i in range(rank) if i not in gone])

    def _on_transpose(self, node: ir.Node) -> Tensor:
        source = self(node.inputs[0])
        order = attribute_ints(node, "perm") or list(range(len(source.shape)))[::-1]
        return self._placed(source, list(order))

    def _on_reshape(self, node: ir.Node) -> Tensor:
        """Axes of size one come and go."""
        source = self(node.inputs[0])
        try:
            target: list[Lin] = self._vector(node.inputs[1])
        except Unknown:
            known = node.outputs[0].shape
            if known is None:
                raise
            target = [of_dim(d, node.outputs[0], i) for i, d in enumerate(known)]
        kept = [i for i, d in enumerate(source.shape) if d.number != 1]
        wanted = [i for i, d in enumerate(target) if d.number != 1]
        if len(kept) == len(wanted) - 1:  # -1 is what is left: one
            wanted = [i for i in wanted if target[i].number != -1]
            target = [Lin(1) if d.number == -1 else d for d in target]
        if len(kept) != len(wanted):
            # one axis of unknown size may be one
            raise Unknown("a reshape that mixes axes")
        places: list[int | None] = [None] * len(target)
        for old, new in zip(kept, wanted, strict=True):
            size = target[new]
            if size.number not in (-1, 0) and size != source.shape[old]:
                raise Unknown("a reshape that mixes axes")
            places[new] = old
        return self._placed(source, places)

    @staticmethod
    def _placed(source: Tensor, places: list[int | None]) -> Tensor:
        """A tensor whose axis i is the source's axis ``places[i]``, or new, of size one."""
        rank, before = len(places), len(source.shape)
        element = source.element
        if isinstance(element, Vec):
            if not places or places[-1] != before - 1:
                element = even(element)
            if isinstance(element, Vec) and (not places or places[-1] != before - 1):
                raise Unknown("a vector that moves")
        gone = {f"@{before - i}": Lin(0) for i in range(before) if i not in places}
        moved = {f"@{before - p}": axis(rank - i) for i, p in enumerate(places) if p is not None}
        shape = tuple(Lin(1) if p is None else source.shape[p] for p in places)
        return Tensor(shape, put(element, {**gone, **moved}))

    def _on_expand(self, node: ir.Node) -> Tensor:
        source, result = self(node.inputs[0]), node.outputs[0]
        try:
            wide = tuple(self._vector(node.inputs[1]))
        except Unknown:  # elements don't hang on it
            if result.shape is None:
                raise
            wide = tuple(of_dim(d, result, i) for i, d in enumerate(result.shape))
        return Tensor(broadcast(source.shape, wide), source.element)

    def _on_slice(self, node: ir.Node) -> Tensor:
        source = self(node.inputs[0])
        starts, ends = self._vector(node.inputs[1]), self._vector(node.inputs[2])
        rank = len(source.shape)
        axes = self.view.ints(node.inputs[3]) if len(node.inputs) > 3 and node.inputs[3] is not None else None
        steps = self.view.ints(node.inputs[4]) if len(node.inputs) > 4 and node.inputs[4] is not None else None
        if any(s != 1 for s in steps or ()):
            raise Unknown("steps")
        shape, element = list(source.shape), source.element
        for i, (start, end) in enumerate(zip(starts, ends, strict=True)):
            at = (axes[i] if axes is not None else i) % rank
            if self._is_table(node.inputs[0]) and (shape[at].number or 0) > 1:
                # a table: where it ends before a size, what is left does not fit the scores, and the original fails
                first, last = place(start, shape[at]), place(end, shape[at])
            else:
                first, last = bound(start, shape[at]), bound(end, shape[at])
            if isinstance(element, Vec) and at == rank - 1:
                if first.number is None or last.number is None:
                    raise Unknown("a slice of a vector")
                element = Vec(element.items[first.number : last.number])
            else:
                element = put(element, {f"@{rank - at}": axis(rank - at) + first})
            shape[at] = last - first
        return Tensor(tuple(shape), element)

    def _is_table(self, value: ir.Value | None) -> bool:
        """A constant, or what is cut out of one."""
        while value is not None and not self.view.is_const(value):
            producer = value.producer()
            if not is_op(producer, "Slice") or producer is None:
                return False
            value = producer.inputs[0]
        return value is not None

    def _on_concat(self, node: ir.Node) -> Tensor:
        parts = [self(v) for v in node.inputs]
        rank = len(parts[0].shape)
        at = attribute_int(node, "axis", 0) % rank
        counts = [p.shape[at].number for p in parts]
        if at == rank - 1 and all(c is not None and c <= 16 for c in counts):
            items: list[Element] = []
            for part, count in zip(parts, counts, strict=True):
                assert count is not None
                if isinstance(part.element, Vec):
                    items += part.element.items
                else:
                    items += [put(part.element, {"@1": Lin(i)}) for i in range(count)]
            shape = parts[0].shape
            for part in parts[1:]:
                shape = (*broadcast(shape[:-1], part.shape[:-1]), shape[-1])
            return Tensor((*shape[:-1], Lin(len(items))), Vec(tuple(items)))
        name = f"@{rank - at}"
        length, element = Lin(0), None
        for part in parts:
            shifted = put(part.element, {name: axis(rank - at) - length})
            if element is None:
                first, element = part, part.element
            elif shifted != element:
                # a first part of one entry may lie on the same line as what follows
                if length.number != 1 or put(shifted, {name: Lin(0)}) != put(element, {name: Lin(0)}):
                    raise Unknown("parts that differ")
                element = shifted
            length += part.shape[at]
        assert element is not None
        return Tensor((*first.shape[:at], length, *first.shape[at + 1 :]), element)

    def _on_gather(self, node: ir.Node) -> Tensor:
        data, index = self(node.inputs[0]), self(node.inputs[1])
        at = attribute_int(node, "axis", 0) % len(data.shape)
        if isinstance(data.element, Vec):
            if (index.shape and index.shape != (Lin(1),)) or at != len(data.shape) - 1:
                raise Unknown("a gather in a vector")
            number = number_of(index.element if not isinstance(index.element, Vec) else index.element.items[0])
            if number is None:
                raise Unknown("a computed place")
            item = data.element.items[int(number)]
            return Tensor((*data.shape[:-1], *index.shape), item)
        if not isinstance(index.element, Lin) or any(not d.at_least_zero() for d in (index.element,)):
            raise Unknown("a place that may be negative")
        extra, rank = len(index.shape), len(data.shape)
        after = rank - 1 - at
        place = index.element.put({f"@{i}": axis(i + after) for i in range(1, extra + 1)})
        change = {f"@{rank - i}": axis(rank - 1 + extra - i) for i in range(at)}
        element = put(data.element, {**change, f"@{rank - at}": place})
        return Tensor((*data.shape[:at], *index.shape, *data.shape[at + 1 :]), element)

    def _on_gathernd(self, node: ir.Node) -> Tensor:
        data, index = self(node.inputs[0]), self(node.inputs[1])
        if attribute_int(node, "batch_dims", 0):
            raise Unknown("batch_dims")
        depth = index.shape[-1].number
        if depth is None or depth != len(data.shape):
            raise Unknown("part of an index")
        if isinstance(index.element, Vec):
            items = list(index.element.items)
        else:
            items = [put(index.element, {"@1": Lin(i)}) for i in range(depth)]
        lower = {f"@{i}": axis(i - 1) for i in range(2, len(index.shape) + 1)}
        change: dict[str, Lin] = {}
        for i, item in enumerate(items):
            if not isinstance(item, Lin) or not item.at_least_zero():
                raise Unknown("a place that may be negative")
            change[f"@{depth - i}"] = item.put(lower)
        return Tensor(index.shape[:-1], put(data.element, change))
