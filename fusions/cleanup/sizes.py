"""Sizes that a graph computes although its shapes tell them.

A `Reshape` of `[B, T, 36]` to `[B, T, -1, 12]` makes three of the open size. onnx's inference gives it a new name, as
PyTorch's older exporter does, and numbers of heads are unknown then.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import onnx_ir as ir

from ..dims import symbol
from ..graph import is_op
from ..passes import Pass
from ..result import PassReport
from .constants import FoldConstants
from .infer import infer_open, look

#: What one size tells may tell another.
ROUNDS = 4


class SpellSizes(Pass):
    """Say the open sizes of reshaped values that their inputs tell, fold what they make constant, and repeat."""

    name = "spell-sizes"
    needs = frozenset({"folded"})

    def run(self, model: ir.Model, report: PassReport) -> None:
        infer_open(model)
        for _ in range(ROUNDS):
            before = look(model)
            told: dict[str, int | ir.SymbolicDim] = {}
            for node in model.graph:
                if is_op(node, "Reshape"):
                    told |= _open_size(node)
            for node in model.graph if told else ():
                for value in node.outputs:
                    _put(value, told)
            folded = PassReport("")
            FoldConstants().run(model, folded)
            if not told and not folded.matched:
                break
            report.matched += len(told) + folded.matched
            infer_open(model)
            if look(model) == before:
                break
        report.changed = report.matched > 0


def _open_size(node: ir.Node) -> dict[str, int | ir.SymbolicDim]:
    """The one size of the result that the input's sizes give a number, or another name, by its name."""
    source, result = node.inputs[0], node.outputs[0]
    if source is None or source.shape is None or result.shape is None:
        return {}
    before, after = list(source.shape), list(result.shape)
    for dim in list(before):
        if not isinstance(dim, int) and dim in after:
            before.remove(dim)
            after.remove(dim)
    names = [symbol(d) for d in after if not isinstance(d, int)]
    numbers = [d for d in before if isinstance(d, int)]
    if len(names) != 1 or names[0] is None or not names[0].isidentifier():
        return {}
    whole, rest = math.prod(numbers), math.prod(d for d in after if isinstance(d, int))
    if len(numbers) < len(before):
        named = [d for d in before if not isinstance(d, int)]
        alike = len(named) == 1 and symbol(named[0]) is not None and whole == rest and whole > 0
        return {names[0]: named[0]} if alike and names[0].startswith("unk__") else {}
    return {names[0]: whole // rest} if rest and whole and whole % rest == 0 else {}


def _put(value: ir.Value, told: Mapping[str, int | ir.SymbolicDim]) -> None:
    """Numbers, or better names, for names in a value's shape; what the model promises of its outputs stays."""
    if value.shape is None or value.is_graph_output():
        return
    dims = [told.get(symbol(d) or "", d) for d in value.shape]
    if dims != list(value.shape):
        value.shape = ir.Shape(dims)
