"""Axes of inputs that have neither a size nor a name: named while a model is worked on."""

from __future__ import annotations

import onnx_ir as ir

from ..passes import Pass
from ..result import PassReport


class NameAxes(Pass):
    """Give every unnamed axis of the graph's inputs a name of its own, and forget inner shapes that lack names.

    Some tools drop the names of dynamic axes. Recognisers and proofs tell axes apart by name; a name that stands
    nowhere else says nothing that the model did not say. :meth:`restore` takes the names back.
    """

    name = "name-axes"

    def __init__(self) -> None:
        self._before: dict[str | None, ir.Shape] = {}

    def run(self, model: ir.Model, report: PassReport) -> None:
        graph = model.graph
        values = [*graph.inputs, *(v for node in graph for v in node.outputs)]
        taken = {str(d.value) for v in values for d in v.shape or () if isinstance(d, ir.SymbolicDim)}
        for value in graph.inputs:
            shape = value.shape
            if shape is None or not _unnamed(shape):
                continue
            self._before[value.name] = shape
            dims: list[int | str] = []
            for axis, dim in enumerate(shape):
                if isinstance(dim, int):
                    dims.append(dim)
                elif dim.value is not None:
                    dims.append(str(dim.value))
                else:
                    dims.append(_free(f"{value.name}_{axis}", taken))
                    report.matched += 1
            value.shape = ir.Shape(dims)
        if not self._before:
            return
        report.changed = True
        results = set(graph.outputs)
        for node in graph:
            for value in node.outputs:
                if value.shape is None or not _unnamed(value.shape):
                    continue
                if value in results:
                    self._before[value.name] = value.shape
                value.shape = None

    def restore(self, model: ir.Model) -> None:
        """The interface's shapes as they were. What a pass made anew with another rank keeps its own."""
        for value in (*model.graph.inputs, *model.graph.outputs):
            shape = self._before.get(value.name)
            if shape is not None and (value.shape is None or len(value.shape) == len(shape)):
                value.shape = shape


def _unnamed(shape: ir.Shape) -> bool:
    return any(not isinstance(d, int) and d.value is None for d in shape)


def _free(stem: str, taken: set[str]) -> str:
    """A name like ``stem`` that is an identifier and not taken."""
    name = "".join(c if c.isalnum() else "_" for c in stem)
    name = f"d{name}" if not name[:1].isalpha() else name
    while name in taken:
        name += "_"
    taken.add(name)
    return name
