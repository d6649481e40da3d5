"""Channels followed through the nodes of a block, which are written anew with some of the channels only."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import onnx_ir as ir

from ..graph import attribute_int, attribute_ints, attribute_string, rank_of, static_dims
from ..proof.heads import ELEMENTWISE
from ..proof.spread import HeadsMix
from .channel_picks import ChannelPicks
from .channel_writer import Kept, Kinds

_POINTWISE = ELEMENTWISE | {"CastLike", "Gelu", "IsInf", "Reciprocal", "Swish", "Sum", "Mean"}


class Channels(ChannelPicks):
    """One rule for each operator: how its result's channels follow from its operands'."""

    def run(self, nodes: Iterable[ir.Node]) -> None:
        """Follow the channels through all nodes.

        Raises:
            HeadsMix: a node that has no rule for channels, or does not treat them alike.
        """
        for node in nodes:
            if not self.shape_step(node):
                cut = [v for v in node.inputs if v is not None and self.kinds.get(v)]
                if cut:
                    self._rule(node)
                else:
                    self.protos.append(ir.serde.serialize_node(node))

    # --- rules ------------------------------------------------------------------------------------------------------

    def _rule(self, node: ir.Node) -> None:
        kind = node.op_type
        rule = getattr(self, f"_{kind.lower()}", None)
        if kind == "FusedGemm":
            self._gemm(node)
        elif kind in _POINTWISE:
            self._pointwise(node)
        elif kind == "DequantizeLinear":
            self._copy_of(node, 0)
        elif rule is not None and kind in _RULES:
            rule(node)
        else:
            raise HeadsMix(f"there is no rule for {kind} {node.name!r}")

    def _copy_of(self, node: ir.Node, place: int) -> None:
        source = node.inputs[place]
        assert source is not None
        self.kinds[node.outputs[0]] = dict(self.kinds.get(source, {}))
        self._write(node)

    def _pointwise(self, node: ir.Node) -> None:
        ranks = {v: rank_of(v) for v in node.inputs if v is not None}
        if None in ranks.values():
            raise HeadsMix(f"the rank of an operand of {node.name!r} is not known")
        top = max(r for r in ranks.values() if r is not None)
        whole: Kinds = {}
        for value, rank in ranks.items():
            for axis, kept in self.kinds.get(value, {}).items():
                at = axis + top - (rank or 0)
                if whole.setdefault(at, kept) != kept:
                    raise HeadsMix(f"{node.op_type} {node.name!r} mixes channels")
        names: dict[int, str] = {}
        for i, operand in enumerate(node.inputs):
            if operand is None:
                continue
            for axis, kept in whole.items():
                at = axis - top + (ranks[operand] or 0)
                if at >= 0:
                    names[i] = self._want(operand, at, kept)
        self.kinds[node.outputs[0]] = whole
        self._write(node, names)

    def _matmul(self, node: ir.Node) -> None:
        left, right = node.inputs
        assert left is not None
        assert right is not None
        a, b = rank_of(left), rank_of(right)
        if a is None or b is None or a < 2 or b < 2:
            raise HeadsMix(f"the rank of an operand of {node.name!r} is not known")
        mine, theirs = self.kinds.get(left, {}), self.kinds.get(right, {})
        names = {}
        contracted = mine.get(a - 1) or theirs.get(b - 2)
        if contracted is not None:
            names = {0: self._want(left, a - 1, contracted), 1: self._want(right, b - 2, contracted)}
        top, out = max(a, b), {}
        for kinds, rank, place in ((mine, a, a - 1), (theirs, b, b - 2)):
            for axis, kept in kinds.items():
                if axis == place:
                    continue
                if axis < rank - 2:
                    raise HeadsMix(f"{node.name!r} has channels along a batch axis")
                out[axis + top - rank] = kept
        self.kinds[node.outputs[0]] = out
        self._write(node, names)

    def _gemm(self, node: ir.Node) -> None:
        left, right = node.inputs[:2]
        assert left is not None
        assert right is not None
        turned = attribute_int(node, "transB", 0)
        if attribute_int(node, "transA", 0):
            raise HeadsMix(f"{node.name!r} is transposed")
        into, out = (1, 0) if turned else (0, 1)
        names, found = {}, {}
        contracted = self.kinds.get(left, {}).get(1) or self.kinds.get(right, {}).get(into)
        if contracted is not None:
            names = {0: self._want(left, 1, contracted), 1: self._want(right, into, contracted)}
        if 0 in self.kinds.get(left, {}):
            raise HeadsMix(f"{node.name!r} has channels along its rows")
        kept = self.kinds.get(right, {}).get(out)
        if kept is not None:
            found[1] = kept
            bias = node.inputs[2] if len(node.inputs) > 2 else None
            if bias is not None:
                names[2] = self._want(bias, (rank_of(bias) or 0) - 1, kept)
        self.kinds[node.outputs[0]] = found
        self._write(node, names)

    def _einsum(self, node: ir.Node) -> None:
        left, _, result = attribute_string(node, "equation", "").replace(" ", "").partition("->")
        letters: dict[str, Kept] = {}
        terms = left.split(",")
        if "." in left or not result:
            raise HeadsMix(f"{node.name!r} has an equation without letters")
        for value, term in zip(node.inputs, terms, strict=True):
            for axis, kept in self.kinds.get(value, {}).items():  # type: ignore[arg-type]
                if letters.setdefault(term[axis], kept) != kept:
                    raise HeadsMix(f"{node.name!r} mixes channels")
        names = {}
        for i, (value, term) in enumerate(zip(node.inputs, terms, strict=True)):
            for axis, letter in enumerate(term):
                if letter in letters and value is not None:
                    names[i] = self._want(value, axis, letters[letter])
        self.kinds[node.outputs[0]] = {i: letters[c] for i, c in enumerate(result) if c in letters}
        self._write(node, names)

    def _transpose(self, node: ir.Node) -> None:
        source = node.inputs[0]
        assert source is not None
        order = attribute_ints(node, "perm") or list(range(rank_of(source) or 0))[::-1]
        kinds = self.kinds[source]
        self.kinds[node.outputs[0]] = {i: kinds[a] for i, a in enumerate(order) if a in kinds}
        self._write(node)

    def _axes(self, node: ir.Node) -> list[int] | None:
        return attribute_ints(node, "axes") or (self.view.ints(node.inputs[1]) if len(node.inputs) > 1 else None)

    def _unsqueeze(self, node: ir.Node) -> None:
        source, axes = node.inputs[0], self._axes(node)
        rank = None if source is None else rank_of(source)
        if source is None or axes is None or rank is None:
            raise HeadsMix(f"{node.name!r} has computed axes")
        where = {a % (rank + len(axes)) for a in axes}
        places = [i for i in range(rank + len(axes)) if i not in where]
        self.kinds[node.outputs[0]] = {places[a]: k for a, k in self.kinds[source].items()}
        self._write(node)

    def _squeeze(self, node: ir.Node) -> None:
        source, axes = node.inputs[0], self._axes(node)
        rank = None if source is None else rank_of(source)
        if source is None or axes is None or rank is None:
            raise HeadsMix(f"{node.name!r} has computed axes")
        where = {a % rank for a in axes}
        places = [i for i in range(rank) if i not in where]
        self.kinds[node.outputs[0]] = {places.index(a): k for a, k in self.kinds[source].items()}
        self._write(node)

    def _reshape(self, node: ir.Node) -> None:
        source, result = node.inputs[0], node.outputs[0]
        assert source is not None
        before, after = static_dims(source), static_dims(result)
        kinds = self.kinds[source]
        if before is None or after is None:
            raise HeadsMix(f"the shapes of {node.name!r} are not known")
        first = min(kinds)
        if None not in before[first:] and before[first:] == after[first - len(before) :]:
            # all that is cut, and what follows it, stays as it is
            self._reshaped(node, after, {a + len(after) - len(before): k for a, k in kinds.items()})
            return
        if len(kinds) > 1:
            raise HeadsMix(f"{node.name!r} moves two cut axes")
        axis, kept = next(iter(kinds.items()))
        if None in before[axis + 1 :]:
            raise HeadsMix(f"the shapes of {node.name!r} are not known")
        inner = math.prod(d or 0 for d in before[axis + 1 :])
        at, size, tail = len(after), 1, kept.size * inner
        while at > 0 and size < tail:
            at -= 1
            if after[at] is None:
                raise HeadsMix(f"the shapes of {node.name!r} are not known")
            size *= after[at] or 0
        if size != tail:
            raise HeadsMix(f"{node.name!r} mixes channels with other axes")
        stays = np.zeros(kept.size, bool)
        stays[list(kept.indices)] = True
        mask = np.repeat(stays, inner).reshape([d or 0 for d in after[at:]])
        varying = [i for i in range(mask.ndim) if np.any(np.take(mask, [0], i) != mask)]
        if len(varying) > 1:
            raise HeadsMix(f"{node.name!r} spreads channels over two axes")
        found: Kinds = {}
        if varying:
            line = np.moveaxis(mask, varying[0], 0).reshape(mask.shape[varying[0]], -1)[:, 0]
            found = {at + varying[0]: Kept(tuple(int(i) for i in np.flatnonzero(line)), len(line))}
        self._reshaped(node, after, found)

    def _reshaped(self, node: ir.Node, after: list[int | None], found: Kinds) -> None:
        target = [len(found[i].indices) if i in found else d for i, d in enumerate(after)]
        if sum(d is None for d in target) > 1:
            raise HeadsMix(f"the result of {node.name!r} has two unknown axes")
        self.kinds[node.outputs[0]] = found
        self._write(node, {1: self._ints(-1 if d is None else d for d in target)}, drop=("allowzero",))

    def _expand(self, node: ir.Node) -> None:
        source = node.inputs[0]
        assert source is not None
        shape, rank = self.view.ints(node.inputs[1]), rank_of(source)
        if shape is None or rank is None:
            raise HeadsMix(f"{node.name!r} expands to a computed shape")
        shift = len(shape) - rank
        found = {a + shift: k for a, k in self.kinds[source].items()}
        self.kinds[node.outputs[0]] = found
        self._write(node, {1: self._ints(1 if i in found else d for i, d in enumerate(shape))})

    def _concat(self, node: ir.Node) -> None:
        rank = rank_of(node.inputs[0]) if node.inputs[0] is not None else None
        if rank is None:
            raise HeadsMix(f"the rank of an operand of {node.name!r} is not known")
        axis = attribute_int(node, "axis", 0) % rank
        kinds: Kinds = {}
        for value in node.inputs:
            for at, kept in self.kinds.get(value, {}).items():  # type: ignore[arg-type]
                if at == axis or kinds.setdefault(at, kept) != kept:
                    raise HeadsMix(f"{node.name!r} joins channels")
        names = {}
        for i, value in enumerate(node.inputs):
            for at, kept in kinds.items():
                assert value is not None
                names[i] = self._want(value, at, kept)
        self.kinds[node.outputs[0]] = kinds
        self._write(node, names)

    def _reducesum(self, node: ir.Node) -> None:
        source, axes = node.inputs[0], self._axes(node)
        rank = None if source is None else rank_of(source)
        if source is None or axes is None or rank is None:
            raise HeadsMix(f"{node.name!r} has computed axes")
        gone = {a % rank for a in axes}
        kinds = {a: k for a, k in self.kinds[source].items() if a not in gone}
        if attribute_int(node, "keepdims", 1) == 0:
            places = [i for i in range(rank) if i not in gone]
            kinds = {places.index(a): k for a, k in kinds.items()}
        self.kinds[node.outputs[0]] = kinds
        self._write(node)


_RULES = frozenset(
    "Concat Einsum Expand Gather GatherElements GatherND Gemm MatMul ReduceSum Reshape ScatterElements ScatterND Slice "
    "Split Squeeze Transpose Unsqueeze".split()
)
