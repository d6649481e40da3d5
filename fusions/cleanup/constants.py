"""Constants: `Constant` nodes become initializers; small constant expressions and known shapes are folded."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as common

from ..graph import GraphView, is_op
from ..passes import Pass
from ..result import PassReport

#: Largest folded tensor, in elements: shapes, masks, per-head parameters; never a weight matrix.
_FOLD_LIMIT = 1 << 16


def _dims_given(shape: ir.Node) -> list[int | ir.SymbolicDim] | None:
    """The dims that a `Shape` gives, None where its input has no known rank."""
    value = shape.inputs[0]
    if value is None or value.shape is None:
        return None
    start = shape.attributes["start"].as_int() if "start" in shape.attributes else 0
    end = shape.attributes["end"].as_int() if "end" in shape.attributes else len(value.shape)
    return list(value.shape)[start:end]


def _sliced(view: GraphView, node: ir.Node, count: int) -> np.ndarray | None:
    """The places that a `Slice` takes of a list of so many sizes."""
    given = [view.ints(v) for v in node.inputs[1:]]
    numbers = [g[0] for g in given if g is not None and len(g) == 1]
    if len(given) < 2 or len(numbers) != len(given):
        return None
    step = numbers[3] if len(numbers) > 3 else 1
    return np.arange(count)[numbers[0] : numbers[1] : step] if step > 0 else None


class LiftConstants(Pass):
    """`Constant` nodes become initializers, so that a constant has one form."""

    name = "lift-constants"
    gives = frozenset({"constants"})

    def run(self, model: ir.Model, report: PassReport) -> None:
        before = len(model.graph.initializers)
        report.changed = bool(common.LiftConstantsToInitializersPass(lift_all_constants=True)(model).modified)
        report.matched = len(model.graph.initializers) - before


class FoldConstants(Pass):
    """Replace small constant expressions by their values, and `Shape` of a value, or entries of it, with static dims.

    Exporters that were asked not to optimise leave ``exp(A_log)`` or a reshaped bias as nodes. Weights are not
    folded: they stay lazy, in their file.
    """

    needs = frozenset({"constants", "types"})
    gives = frozenset({"folded"})

    def __init__(self, name: str = "fold-constants") -> None:
        self.name = name

    def run(self, model: ir.Model, report: PassReport) -> None:
        graph = model.graph
        view = GraphView(graph)
        taken = set(graph.initializers)
        for node in list(graph):
            if is_op(node, "Shape"):
                folded = self._static_shape(node)
                if folded is not None:
                    report.matched += self._replace(graph, node.outputs[0], folded, taken)
                continue
            size = self._static_size(view, node)
            if size is not None:
                report.matched += self._replace(graph, node.outputs[0], size, taken)
                continue
            if not all(view.is_const(o) for o in node.outputs):
                continue
            # fold only where the constant meets a computed value: inner steps go with it as unused nodes
            for output in node.outputs:
                if not self._meets_computed(view, output) or self._too_large(view, node):
                    continue
                array = view.array(output)
                if array is not None and array.size <= _FOLD_LIMIT:
                    report.matched += self._replace(graph, output, array, taken)
        if report.matched:
            report.changed = True
            common.RemoveUnusedNodesPass()(model)

    @staticmethod
    def _meets_computed(view: GraphView, value: ir.Value) -> bool:
        return value.is_graph_output() is False and any(
            not all(view.is_const(o) for o in user.outputs) for user in view.users(value)
        )

    @staticmethod
    def _too_large(view: GraphView, node: ir.Node) -> bool:
        """A weight among the inputs, or a result known to be large: not worth reading. Quantized weights stay as they
        are stored."""
        stack, seen = [node], set()
        while stack:
            current = stack.pop()
            if is_op(current, "DequantizeLinear") and len(current.outputs[0].shape or ()) > 1:
                return True
            for value in current.inputs:
                if value is None:
                    continue
                producer = value.producer()
                if producer is not None and producer not in seen:
                    seen.add(producer)
                    stack.append(producer)
                elif value.const_value is not None and value.const_value.size > _FOLD_LIMIT:
                    return True
        shape = node.outputs[0].shape
        return shape is not None and shape.is_static() and int(np.prod(shape.numpy() or (1,))) > _FOLD_LIMIT

    @staticmethod
    def _static_shape(node: ir.Node) -> np.ndarray | None:
        dims = _dims_given(node)
        return None if dims is None or not all(isinstance(d, int) for d in dims) else np.array(dims, np.int64)

    @staticmethod
    def _static_size(view: GraphView, node: ir.Node) -> np.ndarray | None:
        """The numbers that a `Gather` or `Slice` takes of a `Shape`, where those axes have some."""
        shape = node.inputs[0].producer() if is_op(node, "Gather", "Slice") and node.inputs[0] is not None else None
        dims = _dims_given(shape) if shape is not None and is_op(shape, "Shape") else None
        if dims is None:
            return None
        index = view.array(node.inputs[1]) if is_op(node, "Gather") else _sliced(view, node, len(dims))
        if index is None or index.size > 16:
            return None
        if index.size and not (-len(dims) <= int(index.min()) and int(index.max()) < len(dims)):
            return None
        picked = [dims[int(i)] for i in index.reshape(-1)]
        if not all(isinstance(d, int) for d in picked):
            return None
        return np.array(picked, np.int64).reshape(index.shape)

    @staticmethod
    def _replace(graph: ir.Graph, old: ir.Value, array: np.ndarray, taken: set[str]) -> int:
        if old.is_graph_output() or not old.uses():
            return 0
        name = f"{old.name}_folded"
        while name in taken:
            name += "_"
        taken.add(name)
        tensor = ir.Tensor(array, name=name)
        new = ir.Value(name=name, shape=ir.Shape(array.shape), type=ir.TensorType(tensor.dtype), const_value=tensor)
        graph.register_initializer(new)
        old.replace_all_uses_with(new)
        return 1
