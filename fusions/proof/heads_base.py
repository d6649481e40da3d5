"""Where heads lie in the values of a region, and what a cut-down graph is made of."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

import numpy as np
import onnx
import onnx_ir as ir
from onnx import numpy_helper

from ..graph import GraphView
from .spread import HeadsMix, Spread, shape_of


class Heads:
    """The heads of values that were followed so far, and the constants that stand for cut ones."""

    def __init__(
        self,
        view: GraphView,
        keep: Iterable[int],
        spreads: Mapping[ir.Value, Spread],
        constants: Callable[[ir.Value], np.ndarray],
        parameters: Collection[ir.Value],
        shared: int = 0,
    ) -> None:
        self.parameters, self.shared = parameters, shared
        self.view, self.keep, self.constants = view, frozenset(keep), constants
        self.spreads: dict[ir.Value, Spread] = dict(spreads)
        self.tensors: dict[str, onnx.TensorProto] = {}

    def tensor(self, stem: str, array: np.ndarray) -> str:
        """A new initializer; equal requests give one tensor."""
        array = np.ascontiguousarray(array)
        name = f"{stem}__{hash((array.dtype.str, array.shape, array.tobytes())) & 0xFFFFFFFFFFFF:x}"
        if name not in self.tensors:
            self.tensors[name] = numpy_helper.from_array(array, name)
        return name

    def cut(self, value: ir.Value, spread: Spread, axis: int) -> str:
        """The name of a constant, cut along ``axis`` where it has heads there."""
        array = self.constants(value)
        if value not in self.parameters and not _same_for_all(array, spread, axis):
            raise HeadsMix(f"the constant {value.name!r} differs from head to head and is no parameter of the op")
        if array.ndim == 0 or array.shape[axis] == 1:
            return self.tensor(value.name or "constant", array)
        if array.shape[axis] != len(spread.owner):
            raise HeadsMix(
                f"the constant {value.name!r} has {array.shape[axis]} entries where heads make {len(spread.owner)}"
            )
        return self.tensor(value.name or "constant", np.take(array, spread.kept(self.keep), axis=axis))

    def kept_count(self, spread: Spread) -> int:
        return len(spread.kept(self.keep))

    def _give(self, node: ir.Node, spread: Spread, output: int = 0) -> None:
        value = node.outputs[output]
        if set(spread.owner) != set(self._all_heads):
            raise HeadsMix("it picks some of the heads")
        self.spreads[value] = spread

    @property
    def _all_heads(self) -> set[int]:
        first = next(iter(self.spreads.values()))
        return set(first.owner)

    def _only(self, node: ir.Node) -> Spread:
        """The spread of the first input, which must be the only one that has heads."""
        first = node.inputs[0]
        if (
            first is None
            or first not in self.spreads
            or any(v in self.spreads for v in node.inputs[1:] if v is not None)
        ):
            raise HeadsMix("heads where none were expected")
        return self.spreads[first]

    def _const_ints(self, value: ir.Value | None) -> list[int]:
        found = self.view.ints(value)
        if found is None:
            raise HeadsMix("an operand that should be constant is computed")
        return found

    def _aligned(self, node: ir.Node, rank: int, values: Iterable[ir.Value | None]) -> Spread:
        """One spread, in the output's axes, that all inputs with heads agree on."""
        found: set[Spread] = set()
        for value in values:
            if value is not None and value in self.spreads:
                spread = self.spreads[value]
                found.add(Spread(spread.axis + rank - len(shape_of(value)), spread.owner))
        if len(found) != 1:
            raise HeadsMix("its operands have their heads in different places")
        return next(iter(found))


def _same_for_all(array: np.ndarray, spread: Spread, axis: int) -> bool:
    """Is each head's part of the constant the same?"""
    if array.ndim == 0 or array.shape[axis] != len(spread.owner):
        return True
    owner = np.array(spread.owner)
    parts = [np.take(array, np.flatnonzero(owner == h), axis=axis) for h in dict.fromkeys(spread.owner)]
    return all(p.shape == parts[0].shape and np.array_equal(p, parts[0]) for p in parts[1:])
