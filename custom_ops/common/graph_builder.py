"""A small builder for function bodies in standard ONNX ops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir


class GraphBuilder:
    """Collects nodes of one graph; subgraphs share the root's names and constants.

    Constants become ``Constant`` nodes at the start of the root graph (function bodies have no initializers), one for
    each distinct value, and subgraphs capture them.
    """

    def __init__(self, parent: GraphBuilder | None = None) -> None:
        self.root: GraphBuilder = self if parent is None else parent.root
        self.nodes: list[ir.Node] = []
        if parent is None:
            self._constants: dict[tuple[Any, ...], ir.Value] = {}
            self._constant_nodes: list[ir.Node] = []
            self._count = 0

    def fresh(self, stem: str) -> str:
        """A name that no other value of the whole body has."""
        self.root._count += 1
        return f"{stem}_{self.root._count}"

    def value(
        self, stem: str, dtype: ir.DataType | None = None, shape: Sequence[int | str | None] | None = None
    ) -> ir.Value:
        """A value that no node makes: an input of a graph."""
        return ir.Value(
            name=self.fresh(stem),
            type=None if dtype is None else ir.TensorType(dtype),
            shape=None if shape is None else ir.Shape(shape),
        )

    def const(self, array: Any, dtype: Any = None) -> ir.Value:
        """A constant: integers are int64 unless ``dtype`` says otherwise, floats float32."""
        value = np.asarray(array)
        if dtype is not None:
            value = value.astype(dtype)
        elif value.dtype.kind == "f":
            value = value.astype(np.float32)
        elif value.dtype.kind == "i" or value.size == 0:
            value = value.astype(np.int64)
        key = (value.dtype.str, value.dtype.name, value.shape, value.tobytes())
        root = self.root
        if key not in root._constants:
            node = ir.node("Constant", [], {"value": ir.tensor(value)}, num_outputs=1)
            node.outputs[0].name = self.fresh("const")
            root._constant_nodes.append(node)
            root._constants[key] = node.outputs[0]
        return root._constants[key]

    def op(self, op_type: str, *inputs: ir.Value | None, **attributes: Any) -> ir.Value:
        """Add a node with one output."""
        return self.ops(op_type, inputs, 1, **attributes)[0]

    def ops(
        self, op_type: str, inputs: Sequence[ir.Value | None], num_outputs: int, **attributes: Any
    ) -> Sequence[ir.Value]:
        """Add a node with ``num_outputs`` outputs."""
        node = ir.node(op_type, inputs, attributes, num_outputs=num_outputs, name=self.fresh(f"n_{op_type}"))
        for output in node.outputs:
            output.name = self.fresh(op_type.lower())
        self.nodes.append(node)
        return node.outputs

    def subgraph(
        self, name: str, inputs: Sequence[ir.Value], build: Callable[[GraphBuilder], Sequence[ir.Value]]
    ) -> ir.Graph:
        """A graph for Scan, Loop or If: ``build`` adds its nodes and returns its outputs."""
        inner = GraphBuilder(self)
        outputs = build(inner)
        return ir.Graph(inputs, outputs, nodes=inner.nodes, name=self.fresh(name))

    def graph(self, inputs: Sequence[ir.Value], outputs: Sequence[ir.Value], opset: int) -> ir.Graph:
        """The finished root graph."""
        nodes = [*self.root._constant_nodes, *self.nodes]
        return ir.Graph(inputs, outputs, nodes=nodes, opset_imports={"": opset}, name="body")

    # What bodies use all the time.

    def add(self, a: ir.Value, b: ir.Value) -> ir.Value:
        return self.op("Add", a, b)

    def sub(self, a: ir.Value, b: ir.Value) -> ir.Value:
        return self.op("Sub", a, b)

    def mul(self, a: ir.Value, b: ir.Value) -> ir.Value:
        return self.op("Mul", a, b)

    def matmul(self, a: ir.Value, b: ir.Value) -> ir.Value:
        return self.op("MatMul", a, b)

    def reshape(self, x: ir.Value, shape: Sequence[int]) -> ir.Value:
        """0 keeps a dimension, -1 is what remains."""
        return self.op("Reshape", x, self.const(list(shape)))

    def transpose(self, x: ir.Value, perm: Sequence[int]) -> ir.Value:
        return self.op("Transpose", x, perm=list(perm))

    def swap_last(self, x: ir.Value, rank: int) -> ir.Value:
        """Transpose the last two of ``rank`` dimensions."""
        return self.transpose(x, [*range(rank - 2), rank - 1, rank - 2])

    def unsqueeze(self, x: ir.Value, *axes: int) -> ir.Value:
        return self.op("Unsqueeze", x, self.const(list(axes)))

    def squeeze(self, x: ir.Value, *axes: int) -> ir.Value:
        return self.op("Squeeze", x, self.const(list(axes)))

    def concat(self, values: Sequence[ir.Value], axis: int) -> ir.Value:
        return values[0] if len(values) == 1 else self.op("Concat", *values, axis=axis)

    def split(self, x: ir.Value, sizes: Sequence[int], axis: int) -> Sequence[ir.Value]:
        return self.ops("Split", [x, self.const(list(sizes))], len(sizes), axis=axis)

    def slice(self, x: ir.Value, axis: int, start: ir.Value | int, stop: ir.Value | int | None) -> ir.Value:
        """``x[start:stop]`` along ``axis``; bounds are numbers or int64 ``[1]`` values."""
        bounds = [
            bound if isinstance(bound, ir.Value) else self.const([np.iinfo(np.int64).max if bound is None else bound])
            for bound in (start, stop)
        ]
        return self.op("Slice", x, *bounds, self.const([axis]))

    def dim(self, x: ir.Value, axis: int) -> ir.Value:
        """The size of one dimension, int64 ``[1]``."""
        return self.op("Shape", x, start=axis, end=axis + 1)

    def cast(self, x: ir.Value, dtype: ir.DataType) -> ir.Value:
        return self.op("Cast", x, to=int(dtype))

    def sum_last(self, x: ir.Value) -> ir.Value:
        """Sum over the last axis, kept."""
        return self.op("ReduceSum", x, self.const([-1]), keepdims=1)
