"""A region as a model of its own, in float32, with chosen values as inputs and outputs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
import onnx_ir as ir
from onnx import TensorProto, helper, numpy_helper

from ..dims import UnknownDim, concrete, symbol
from ..graph import FLOAT_TYPES, GraphView, attribute_int, is_op
from ..parameters import is_float

#: Nodes that are looked through for how the shape of a value comes about.
LONGEST_CHAIN = 256


class NotExtractable(Exception):
    """The region depends on something that a proof can't supply."""


@dataclass
class Cut:
    """What takes the place of the region's own nodes, and adds to its constants, when it is cut down."""

    nodes: list[onnx.NodeProto]
    tensors: list[onnx.TensorProto]
    shapes: Mapping[ir.Value, Sequence[int | str | None]]

    def reads(self, constant: ir.Value) -> bool:
        """Do the nodes read a constant of the region as it stands? One of that name here takes its place."""
        if constant.name in self._own:
            return False
        return self._nested or constant.name in self._read

    def __post_init__(self) -> None:
        self._own = {t.name for t in self.tensors}
        self._read = {name for node in self.nodes for name in node.input}
        self._nested = any(a.HasField("g") for node in self.nodes for a in node.attribute)


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
                continue
            chain = self._chain(source, given, produced) if self._has_open_size(source) else None
            if chain is None:
                self.shape_inputs[source] = None
                continue
            for node in chain:
                nodes.add(node)
                produced.update(node.outputs)
                if is_op(node, "Shape", "Size"):
                    shapes.append(node)
        self.nodes = sorted(nodes, key=view.position.__getitem__)
        self._inside = nodes

    def _has_open_size(self, value: ir.Value) -> bool:
        """Has it a size that neither an operand's shape nor a graph input's names?"""
        named = [d for v in (*self.inputs, *self.view.graph.inputs) for d in v.shape or ()]
        return any(not isinstance(d, int) and (symbol(d) is None or d not in named) for d in value.shape or ())

    def _chain(
        self, source: ir.Value, given: Collection[ir.Value], produced: Collection[ir.Value]
    ) -> list[ir.Node] | None:
        """The nodes that make a value of which only the shape is read, from shapes and constants; None where more than
        those is behind it."""
        found: dict[ir.Node, None] = {}
        constants: list[ir.Value] = []
        stack = [source]
        while stack:
            value = stack.pop()
            if value in given or value in produced:
                continue
            producer = value.producer()
            if producer is None:
                if not self.view.is_const(value):
                    return None
                constants.append(value)
            elif producer not in found:
                if len(found) == LONGEST_CHAIN:
                    return None
                found[producer] = None
                stack += [] if is_op(producer, "Shape", "Size") else self.view.inputs_of(producer)
        self.constants.update(dict.fromkeys(constants))
        return list(found)

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
        """Feeds for the values of which only the shape counts; ``env`` has the numbers of the symbolic dims.

        Raises:
            UnknownDim: a dim that the region reads and that nothing gives a number to.
        """
        return {_name(v): np.zeros(self._read_dims(v, env), proof_type(v).numpy()) for v in self.shape_inputs}

    def _read_dims(self, value: ir.Value, env: Mapping[str, int]) -> list[int]:
        """The value's dims; those that no node of the region reads are 1 where nothing gives them a number."""
        try:
            return concrete(value, env)
        except UnknownDim:
            if value.shape is None:
                raise
        read: set[int] = set()
        for node in self.nodes:
            if value in node.inputs:
                axes = range(len(value.shape))
                if is_op(node, "Shape"):
                    axes = axes[slice(attribute_int(node, "start", 0), attribute_int(node, "end", len(axes)))]
                read.update(self._picked(node, axes))
        shape = ir.Shape([d if axis in read else 1 for axis, d in enumerate(value.shape)])
        return concrete(ir.Value(name=value.name, shape=shape), env)

    def _picked(self, shape: ir.Node, axes: range) -> set[int]:
        """Which of a shape's entries the region reads: those that it gathers one by one, or all."""
        found: set[int] = set()
        for user in self.view.users(shape.outputs[0]):
            if user not in self._inside:
                continue
            index = self.view.ints(user.inputs[1]) if is_op(user, "Gather") else None
            if index is None or not all(-len(axes) <= i < len(axes) for i in index):
                return set(axes)
            found.update(axes[i] for i in index)
        return found

    def model(
        self, arrays: Mapping[ir.Value, np.ndarray], kind: int = TensorProto.FLOAT, cut: Cut | None = None
    ) -> onnx.ModelProto:
        """A model of the region in float32, or in float64.

        Args:
            arrays: constants that are replaced, by value (they keep their shape).
            kind: the element type of all floats.
            cut: nodes, tensors and input shapes of the region cut down to fewer heads, in place of its own.
        """
        widen = _Widen(kind)
        graph_inputs = [
            helper.make_tensor_value_info(
                _name(v), _element(v, kind), _shape(v) if cut is None or v not in cut.shapes else cut.shapes[v]
            )
            for v in self.inputs
        ]
        for value in self.shape_inputs:
            graph_inputs.append(helper.make_tensor_value_info(_name(value), _element(value, kind), _shape(value)))
        constants = [v for v in self.constants if cut is None or cut.reads(v)]
        initializers = [self._initializer(v, arrays.get(v), widen) for v in constants]
        if cut is None:
            nodes = [ir.serde.serialize_node(n) for n in self.nodes]
        else:
            nodes = [onnx.NodeProto.FromString(n.SerializeToString()) for n in cut.nodes]
            for tensor in cut.tensors:
                widen.tensor(copied := onnx.TensorProto.FromString(tensor.SerializeToString()))
                initializers.append(copied)
        for node in nodes:
            widen.node(node)
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
    def _initializer(value: ir.Value, array: np.ndarray | None, widen: _Widen) -> onnx.TensorProto:
        if array is None:
            assert value.const_value is not None
            array = value.const_value.numpy()
        if is_float(array.dtype):
            array = array.astype(widen.numpy)
        return numpy_helper.from_array(np.ascontiguousarray(array).reshape(array.shape), _name(value))


def proof_type(value: ir.Value) -> ir.DataType:
    """The type that a value has in a proof: float32 for every float type that arithmetic is done in, else its own."""
    if value.dtype is None or value.dtype in FLOAT_TYPES:
        return ir.DataType.FLOAT
    return value.dtype


def _element(value: ir.Value, kind: int) -> int:
    own = proof_type(value)
    return kind if own == ir.DataType.FLOAT else int(own)


def _shape(value: ir.Value) -> list[int | str | None] | None:
    """The value's dims for a model's input: ORT wants at least the rank where a function or a Scan follows."""
    return None if value.shape is None else [d if isinstance(d, int) else symbol(d) for d in value.shape]


def _name(value: ir.Value) -> str:
    if not value.name:
        raise NotExtractable("a value without a name")
    return value.name


class _Widen:
    """Turns every float type of a graph into one: in casts, tensors, value infos and subgraphs."""

    def __init__(self, kind: int) -> None:
        self.kind = kind
        self.numpy = np.float32 if kind == TensorProto.FLOAT else np.float64
        self._others = {TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.FLOAT, TensorProto.DOUBLE} - {kind}

    def tensor(self, tensor: onnx.TensorProto) -> None:
        if tensor.data_type in self._others:
            wide = numpy_helper.to_array(tensor).astype(self.numpy)
            tensor.CopyFrom(numpy_helper.from_array(wide, tensor.name))

    def node(self, node: onnx.NodeProto) -> None:
        for attribute in node.attribute:
            if attribute.name in ("to", "dtype") and attribute.i in self._others:
                attribute.i = self.kind
            if attribute.HasField("t"):
                self.tensor(attribute.t)
            if attribute.HasField("g"):
                self._graph(attribute.g)

    def _graph(self, graph: onnx.GraphProto) -> None:
        for node in graph.node:
            self.node(node)
        for tensor in graph.initializer:
            self.tensor(tensor)
        for info in [*graph.input, *graph.output, *graph.value_info]:
            if info.type.tensor_type.elem_type in self._others:
                info.type.tensor_type.elem_type = self.kind
