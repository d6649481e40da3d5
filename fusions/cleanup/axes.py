"""Axes of inputs that have neither a size nor a name that can be computed with: named while a model is worked on."""

from __future__ import annotations

import ast
from collections.abc import Iterable

import onnx_ir as ir

from ..dims import symbol
from ..passes import Pass
from ..result import PassReport

_ARITHMETIC = (
    ast.Expression,
    ast.BinOp,
    ast.UnaryOp,
    ast.operator,
    ast.unaryop,
    ast.Constant,
    ast.Call,
    ast.expr_context,
)


class NameAxes(Pass):
    """Give every unnamed axis of the graph's inputs a name of its own, and forget inner shapes that lack names.

    Some tools drop the names of dynamic axes, others write names that are no identifiers, such as
    ``past.0.key_dynamic_axes_1``: those get one, the same everywhere. Recognisers and proofs tell axes apart by name; a
    name that stands nowhere else says nothing that the model did not say. :meth:`restore` takes the names back.
    """

    name = "name-axes"

    def __init__(self) -> None:
        self._before: dict[str | None, ir.Shape] = {}
        self._names: dict[str, str] = {}  # by what the model has

    def run(self, model: ir.Model, report: PassReport) -> None:
        graph = model.graph
        values = [*graph.inputs, *(v for node in graph for v in node.outputs)]
        taken = {name for v in values for d in v.shape or () if (name := symbol(d)) is not None}
        for name in sorted(_no_names(graph.inputs, taken)):
            self._names[name] = _free(name, taken)
        for value in graph.inputs:
            shape = value.shape
            if shape is None or not self._unnamed(shape):
                continue
            self._before[value.name] = shape
            dims: list[int | str] = []
            for axis, dim in enumerate(shape):
                if isinstance(dim, int):
                    dims.append(dim)
                    continue
                name = symbol(dim)
                if name is not None and not _says_nothing(name):
                    dims.append(self._names.get(name, name))
                else:
                    dims.append(_free(f"{value.name}_{axis}", taken))
                report.matched += dims[-1] != name
            value.shape = ir.Shape(dims)
        if not self._before:
            return
        report.changed = True
        results = set(graph.outputs)
        for node in graph:
            for value in node.outputs:
                if value.shape is None or not self._unnamed(value.shape):
                    continue
                if value in results:
                    self._before[value.name] = value.shape
                value.shape = None

    def restore(self, model: ir.Model) -> None:
        """The interface's shapes as they were. What a pass made anew with another rank keeps its own."""
        own = {new: old for old, new in self._names.items()}
        for value in (*model.graph.inputs, *model.graph.outputs):
            shape = self._before.get(value.name)
            if shape is not None and (value.shape is None or len(value.shape) == len(shape)):
                value.shape = shape
            elif own and value.shape is not None:
                value.shape = ir.Shape([own.get(symbol(d) or "", d) for d in value.shape])

    def _unnamed(self, shape: ir.Shape) -> bool:
        """Has it an axis without a name, or with one that another stands for now?"""
        for dim in shape:
            name = symbol(dim)
            if not isinstance(dim, int) and (name is None or _says_nothing(name)):
                return True
            if name is not None and any(old in name for old in self._names):
                return True
        return False


def _no_names(inputs: Iterable[ir.Value], taken: set[str]) -> set[str]:
    """Symbols that are neither identifiers nor arithmetic with such."""
    found = set()
    for name in {name for v in inputs for d in v.shape or () if (name := symbol(d)) is not None}:
        if name.isidentifier() or _says_nothing(name):
            continue
        try:
            nodes = list(ast.walk(ast.parse(name, mode="eval")))
        except SyntaxError:
            found.add(name)
            continue
        names = {n.id for n in nodes if isinstance(n, ast.Name)}
        # a hyphen may be part of a name: no other axis is called by either side of it
        if not all(isinstance(n, (ast.Name, *_ARITHMETIC)) for n in nodes) or ("-" in name and not names & taken):
            found.add(name)
    return found


def _says_nothing(name: str) -> bool:
    """A symbol such as "?", which some tools write for each axis that they know nothing of."""
    return not any(c.isalnum() for c in name)


def _free(stem: str, taken: set[str]) -> str:
    """A name like ``stem`` that is an identifier and not taken."""
    name = "".join(c if c.isalnum() else "_" for c in stem)
    name = f"d{name}" if not name[:1].isalpha() else name
    while name in taken:
        name += "_"
    taken.add(name)
    return name
