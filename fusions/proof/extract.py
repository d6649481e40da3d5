"""A region as a model of its own, in float32, with chosen values as inputs and outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx
import onnx_ir as ir
from onnx import TensorProto, helper, numpy_helper

from ..graph import GraphView, is_op
from .dims import concrete

_HALF = (TensorProto.FLOAT16, TensorProto.BFLOAT16)


class NotExtractable(Exception):
    """The region depends on something that a proof can't supply."""


class Extract:
    """The nodes between ``inputs`` and ``outputs``, shape computations included.

    Attributes:
        nodes: in graph order.
        constants: initializers that the nodes read.
        shape_inputs: values outside the region of which only the shape is read.
    """

    def __init__(self, view: GraphView, inputs: Sequence[ir.Value], outputs: Sequence[ir.Value]) -> None:
        self.view = view
        self.inputs, self.outputs = list(inputs), list(outputs)
        self.constants: dict[ir.Value, None] = {}
        self.shape_inputs: dict[ir.Value, None] = {}
        given = set(inputs)
        shapes: list[ir.Node] = []
        nodes: set[ir.Node] = set()
        stack = list(outputs)
        seen = set(outputs)
        while stack:
            value = stack.pop()
            if value in given:
                continue
            producer = value.producer()
            if producer is None:
                if not view.is_const(value):
                    raise NotExtractable(f"it reads the graph input {value.name!r}")
                self.constants[value] = None
                continue
            if producer in nodes:
                continue
            nodes.add(producer)
            if is_op(producer, "Shape", "Size"):
                shapes.append(producer)
                continue
            for operand in view.inputs_of(producer):
                if operand not in seen:
                    seen.add(operand)
                    stack.append(operand)
        produced = {v for n in nodes for v in n.outputs}
        for shape in shapes:
            source = shape.inputs[0]
            if source is None or source in given or source in produced:
                continue
            if view.is_const(source):
                self._constant(source, nodes, produced)
            else:
                self.shape_inputs[source] = None
        self.nodes = sorted(nodes, key=view.position.__getitem__)

    def _constant(self, value: ir.Value, nodes: set[ir.Node], produced: set[ir.Value]) -> None:
        producer = value.producer()
        if producer is None:
            self.constants[value] = None
        elif producer not in nodes:
            nodes.add(producer)
            produced.update(producer.outputs)
            for operand in producer.inputs:
                if operand is not None:
                    self._constant(operand, nodes, produced)

    def shape_feeds(self, env: Mapping[str, int]) -> dict[str, np.ndarray]:
        """Feeds for the values of which only the shape counts; ``env`` has the numbers of the symbolic dims."""
        return {
            _name(v): np.zeros(concrete(v, env), np.int64 if self.view.is_integer(v) else np.float32)
            for v in self.shape_inputs
        }

    def model(self, arrays: Mapping[ir.Value, np.ndarray]) -> onnx.ModelProto:
        """A float32 model of the region.

        Args:
            arrays: constants that are replaced, by value (they keep their shape).
        """
        graph_inputs = [helper.make_tensor_value_info(_name(v), TensorProto.FLOAT, None) for v in self.inputs]
        for value in self.shape_inputs:
            kind = TensorProto.INT64 if self.view.is_integer(value) else TensorProto.FLOAT
            graph_inputs.append(helper.make_tensor_value_info(_name(value), kind, None))
        initializers = [self._initializer(v, arrays.get(v)) for v in self.constants]
        nodes = [ir.to_proto(n) for n in self.nodes]
        for node in nodes:
            _widen_node(node)
        graph = helper.make_graph(
            nodes,
            "region",
            graph_inputs,
            [onnx.ValueInfoProto(name=_name(v)) for v in self.outputs],
            initializers,
        )
        imports = self.view.graph.opset_imports
        return helper.make_model(
            graph, opset_imports=[helper.make_opsetid(d, v) for d, v in imports.items()], ir_version=10
        )

    @staticmethod
    def _initializer(value: ir.Value, array: np.ndarray | None) -> onnx.TensorProto:
        if array is None:
            assert value.const_value is not None
            array = value.const_value.numpy()
        if array.dtype.kind not in "iub?" and array.dtype != np.float64:
            array = array.astype(np.float32)
        return numpy_helper.from_array(np.ascontiguousarray(array).reshape(array.shape), _name(value))


def _name(value: ir.Value) -> str:
    if not value.name:
        raise NotExtractable("a value without a name")
    return value.name


def _widen_node(node: onnx.NodeProto) -> None:
    """16-bit floats become float32, in casts, in tensors and in subgraphs."""
    for attribute in node.attribute:
        if attribute.name in ("to", "dtype") and attribute.i in _HALF:
            attribute.i = TensorProto.FLOAT
        if attribute.HasField("t") and attribute.t.data_type in _HALF:
            wide = numpy_helper.to_array(attribute.t).astype(np.float32)
            attribute.t.CopyFrom(numpy_helper.from_array(wide, attribute.t.name))
        if attribute.HasField("g"):
            _widen_graph(attribute.g)


def _widen_graph(graph: onnx.GraphProto) -> None:
    for node in graph.node:
        _widen_node(node)
    for tensor in graph.initializer:
        if tensor.data_type in _HALF:
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float32), tensor.name))
    for info in [*graph.input, *graph.output, *graph.value_info]:
        if info.type.tensor_type.elem_type in _HALF:
            info.type.tensor_type.elem_type = TensorProto.FLOAT
