"""Questions that recognisers ask of a graph: what is constant, who uses a value, what is a linear layer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

FLOAT_TYPES = frozenset({ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.DOUBLE})
INTEGER_TYPES = frozenset({ir.DataType.INT64, ir.DataType.INT32})

#: Ops of the default domain whose result is not a function of their inputs alone.
_RANDOM = frozenset(
    {"RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike", "Bernoulli", "Multinomial", "Dropout"}
)
#: ORT's ops that are plain arithmetic and that ORT's own optimiser puts into models.
_TRANSPARENT_CONTRIB = frozenset(
    {"QuickGelu", "Gelu", "SimplifiedLayerNormalization", "FusedMatMul", "GatedRMSNorm", "LinearAttention"}
)
_STANDARD = ("", "ai.onnx")
#: Largest constant that is evaluated out of a graph, in elements.
_EVALUATE_LIMIT = 1 << 24


def subgraphs_of(node: ir.Node) -> list[ir.Graph]:
    """The graphs in the node's attributes."""
    found: list[ir.Graph] = []
    for attribute in node.attributes.values():
        if attribute.is_ref():
            continue
        if attribute.type == ir.AttributeType.GRAPH:
            found.append(attribute.as_graph())
        elif attribute.type == ir.AttributeType.GRAPHS:
            found.extend(attribute.as_graphs())
    return found


def is_op(node: ir.Node | None, *op_types: str) -> bool:
    """Is it a node of the default domain with one of these types?"""
    return node is not None and node.domain in _STANDARD and node.op_type in op_types


def attribute_int(node: ir.Node, name: str, default: int) -> int:
    attribute = node.attributes.get(name)
    return default if attribute is None else attribute.as_int()


def attribute_ints(node: ir.Node, name: str) -> list[int] | None:
    attribute = node.attributes.get(name)
    return None if attribute is None else list(attribute.as_ints())


def attribute_float(node: ir.Node, name: str, default: float) -> float:
    attribute = node.attributes.get(name)
    return default if attribute is None else attribute.as_float()


def attribute_string(node: ir.Node, name: str, default: str) -> str:
    attribute = node.attributes.get(name)
    return default if attribute is None else attribute.as_string()


def rank_of(value: ir.Value) -> int | None:
    return None if value.shape is None else len(value.shape)


def static_dims(value: ir.Value) -> list[int | None] | None:
    """The value's dims, None where one is symbolic; None when the rank is unknown."""
    if value.shape is None:
        return None
    return [d if isinstance(d, int) else None for d in value.shape]


class GraphView:
    """Memoised facts about one graph. Built once after the clean-ups; stale after the graph changes."""

    def __init__(self, graph: ir.Graph) -> None:
        self.graph = graph
        self._captured: dict[ir.Node, list[ir.Value]] = {}
        self._owner: dict[ir.Node, ir.Node] = {}
        self._constant: set[ir.Value] = set()
        self._arrays: dict[ir.Value, np.ndarray] = {}
        self._inputs: dict[ir.Node, tuple[ir.Value, ...]] = {}
        self._borders: dict[ir.Value, bool] = {}
        self.position: dict[ir.Node, int] = {}
        for i, node in enumerate(graph):
            self.position[node] = i
            graphs = subgraphs_of(node)
            if graphs:
                self._captured[node] = self._captures(node, graphs)
            if self._is_constant_node(node):
                self._constant.update(node.outputs)

    def _captures(self, owner: ir.Node, graphs: Iterable[ir.Graph]) -> list[ir.Value]:
        """Outer values that the node's subgraphs read."""
        own: set[ir.Value] = set()
        read: dict[ir.Value, None] = {}
        stack = list(graphs)
        while stack:
            graph = stack.pop()
            own.update(graph.inputs)
            own.update(graph.initializers.values())
            for inner in graph:
                self._owner[inner] = owner
                own.update(inner.outputs)
                read.update((v, None) for v in inner.inputs if v is not None)
                stack.extend(subgraphs_of(inner))
            read.update((v, None) for v in graph.outputs)
        return [v for v in read if v not in own]

    def _is_constant_node(self, node: ir.Node) -> bool:
        if node.domain not in _STANDARD or node.op_type in _RANDOM or subgraphs_of(node):
            return False
        if node.op_type == "Constant":
            return True
        return bool(node.inputs) and all(v is None or self.is_const(v) for v in node.inputs)

    # --- values -------------------------------------------------------------------------------------------------

    def is_const(self, value: ir.Value) -> bool:
        """Does the value depend on initializers and constants alone?"""
        if value in self._constant:
            return True
        return value.producer() is None and value.const_value is not None and not value.is_graph_input()

    def array(self, value: ir.Value | None) -> np.ndarray | None:
        """The constant's elements, computed from its initializers where need be; None when it is none or too large."""
        if value is None or not self.is_const(value):
            return None
        if value in self._arrays:
            return self._arrays[value]
        tensor = value.const_value
        if tensor is None:
            evaluated = self._evaluate(value)
            if evaluated is None:
                return None
            self._arrays[value] = evaluated
            return evaluated
        array: np.ndarray = tensor.numpy()
        if array.size <= 4096:  # large weights stay lazy
            self._arrays[value] = array
        return array

    def _evaluate(self, value: ir.Value) -> np.ndarray | None:
        """Run the constant expression behind a value with onnx's reference implementation."""
        nodes: list[ir.Node] = []
        leaves: dict[ir.Value, None] = {}
        seen: set[ir.Node] = set()
        stack: list[ir.Value] = [value]
        while stack:
            current = stack.pop()
            producer = current.producer()
            if producer is None:
                if current.const_value is None or current.const_value.size > _EVALUATE_LIMIT:
                    return None
                leaves[current] = None
            elif producer not in seen:
                seen.add(producer)
                nodes.append(producer)
                stack.extend(v for v in producer.inputs if v is not None)
        nodes.sort(key=lambda n: self.position.get(n, 0))
        proto = onnx.helper.make_graph(
            [ir.serde.serialize_node(n) for n in nodes],
            "constant",
            [],
            [onnx.ValueInfoProto(name=value.name)],
            [_named(ir.serde.serialize_tensor(v.const_value), v.name) for v in leaves if v.const_value is not None],
        )
        opset = self.graph.opset_imports.get("", 18)
        model = onnx.helper.make_model(proto, opset_imports=[onnx.helper.make_opsetid("", opset)])
        try:
            from onnx.reference import ReferenceEvaluator

            results: Any = ReferenceEvaluator(model).run(None, {})
            return np.asarray(results[0])
        except Exception:  # an op that the reference evaluator lacks: the value stays a computed one
            return None

    def scalar(self, value: ir.Value | None) -> float | None:
        """The one element of a constant, or None."""
        array = self.array(value)
        return float(array.reshape(-1)[0]) if array is not None and array.size == 1 else None

    def ints(self, value: ir.Value | None) -> list[int] | None:
        """A constant integer tensor as a list, or None."""
        array = self.array(value)
        return None if array is None else [int(i) for i in array.reshape(-1)]

    # --- neighbours ---------------------------------------------------------------------------------------------

    def inputs_of(self, node: ir.Node) -> tuple[ir.Value, ...]:
        """All values a node reads, captured ones of its subgraphs too."""
        found = self._inputs.get(node)
        if found is None:
            found = (*(v for v in node.inputs if v is not None), *self._captured.get(node, ()))
            self._inputs[node] = found
        return found

    def users(self, value: ir.Value) -> list[ir.Node]:
        """Nodes of this graph that read the value; a use inside a subgraph counts as its outer node's."""
        found: dict[ir.Node, None] = {}
        for node, _ in value.uses():
            found[self._owner.get(node, node)] = None
        return list(found)

    def is_integer(self, value: ir.Value) -> bool:
        return value.dtype in INTEGER_TYPES

    # --- kinds of nodes -----------------------------------------------------------------------------------------

    def is_opaque(self, node: ir.Node) -> bool:
        """A node of another domain whose mathematics we do not know: recognisers stop there."""
        if node.domain in _STANDARD:
            return False
        return not (node.domain == "com.microsoft" and node.op_type in _TRANSPARENT_CONTRIB)

    def weight_of(self, node: ir.Node) -> ir.Value | None:
        """The weight of a linear layer, or None. A constant state of rank 3 or more is no weight."""
        if is_op(node, "MatMul", "Gemm") or (
            node.domain == "com.microsoft" and node.op_type in ("FusedMatMul", "FusedGemm")
        ):
            for value in (node.inputs[1], node.inputs[0]):
                if value is not None and self.is_const(value) and rank_of(value) == 2:
                    return value
        elif is_op(node, "Conv") and not self.is_depthwise(node):
            weight = node.inputs[1]
            if weight is not None and self.is_const(weight):
                return weight
        elif is_op(node, "Einsum") and len(node.inputs) == 2:
            for value in node.inputs:
                if value is not None and self.is_const(value) and rank_of(value) == 2:
                    return value
        return None

    def is_linear(self, node: ir.Node) -> bool:
        """A linear layer with weights, quantized ones too: the natural border of a block."""
        if self.weight_of(node) is not None:
            return True
        return is_op(node, "MatMulInteger", "QLinearMatMul", "QLinearConv", "ConvInteger") or (
            node.domain == "com.microsoft" and "MatMul" in node.op_type and node.op_type != "FusedMatMul"
        )

    def is_depthwise(self, node: ir.Node) -> bool:
        """A depthwise convolution over one axis with constant weights."""
        if node.op_type == "CausalConvWithState" and node.domain in ("", "ai.onnx", "com.microsoft"):
            return self.is_const(node.inputs[1]) if node.inputs[1] is not None else False
        if not is_op(node, "Conv") and not (node.domain == "com.microsoft" and node.op_type == "FusedConv"):
            return False
        weight = node.inputs[1]
        if weight is None or not self.is_const(weight):
            return False
        dims = static_dims(weight)
        return dims is not None and len(dims) == 3 and dims[1] == 1 and attribute_int(node, "group", 1) == dims[0]

    def is_border(self, value: ir.Value) -> bool:
        """Where a backward walk from a block's output stops: graph inputs, constants, linear layers, convolutions."""
        known = self._borders.get(value)
        if known is None:
            producer = value.producer()
            known = (
                producer is None
                or self.is_const(value)
                or self.is_integer(value)
                or self.is_linear(producer)
                or self.is_depthwise(producer)
                or self.is_opaque(producer)
            )
            self._borders[value] = known
        return known


def _named(tensor: onnx.TensorProto, name: str | None) -> onnx.TensorProto:
    tensor.name = name or ""
    return tensor
