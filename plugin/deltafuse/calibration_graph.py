"""What a calibration looks at in a model's graph, and the reductions that are put there for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from .custom_ops.kda.spec import DOMAIN
from .signature import KEEPS_INDEX, Signature

MARK = "deltafuse.calibration"
#: Ops whose first operand is multiplied by a weight in another one.
_WEIGHTED = {("", "MatMul"), ("", "Gemm"), ("com.microsoft", "MatMulNBits")}
#: Ops through which a weight stays a weight.
_KEEPS_WEIGHT = {
    *("Cast", "Transpose", "Reshape", "Unsqueeze", "Squeeze", "Identity", "DequantizeLinear"),
    *("Gather", "GatherND", "Slice", "Split", "Concat"),
}
_FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16)


def watched_values(proto: onnx.ModelProto, signature: Signature) -> dict[str, tuple[set[str], list[dict[str, Any]]]]:
    """Value name -> what it is of interest for, and the nodes that read it."""
    graph = proto.graph
    weights = {tensor.name for tensor in graph.initializer}
    small = {tensor.name for tensor in graph.initializer if len(tensor.dims) < 2}
    ids = {port.name for port in signature.inputs.values() if port.role in ("tokens", "positions")}
    floats = {v.name: v.type.tensor_type.elem_type in _FLOATS for v in (*graph.value_info, *graph.input)}
    found: dict[str, tuple[set[str], list[dict[str, Any]]]] = {}

    def watch(node: onnx.NodeProto, index: int) -> None:
        name = node.input[index]
        kinds, users = found.setdefault(name, (set(), []))
        kinds.add("weight")
        users.append({"op_type": node.op_type, "name": node.name, "input": index})

    for node in graph.node:
        if node.op_type == "Constant":
            weights.update(node.output)
            small.update(node.output)
        elif node.op_type in KEEPS_INDEX and node.input and node.input[0] in ids:
            ids.update(node.output)
        elif node.op_type == "Gather" and node.input[1] in ids:
            continue  # an embedding: activations
        elif node.op_type in _KEEPS_WEIGHT and node.input and node.input[0] in weights:
            weights.update(node.output)
            small.update(node.output if node.input[0] in small else ())
        elif (node.domain, node.op_type) in _WEIGHTED:
            for index, other in ((0, 1), (1, 0)) if node.op_type == "MatMul" else ((0, 1),):
                turned = node.op_type == "Gemm" and any(a.name == "transA" and a.i for a in node.attribute)
                multiplied = node.input[other] in weights and node.input[other] not in small
                # Channels are the last axis: of a right operand, or a turned left one, they are not.
                if index == 0 and multiplied and node.input[0] not in weights and not turned:
                    watch(node, 0)
        elif node.domain == DOMAIN:
            for index, name in enumerate(node.input):
                if name and name not in weights and floats.get(name, True):
                    watch(node, index)
    for past, output in signature.states.items():
        if floats.get(past, True):  # and no codes of an 8-bit cache, which mean nothing without their scales
            found.setdefault(output, (set(), []))[0].add("cache")
    for name, (_, users) in found.items():
        if not users:
            users += [
                {"op_type": node.op_type, "name": node.name, "input": index}
                for node in graph.node
                for index, read in enumerate(node.input)
                if read == name
            ]
    return found


#: Ops that move whole rows, in the graphs that exporters write: what they read has the channels of what they give.
_MOVES_ROWS = {"Reshape", "Cast", "Identity", "Flatten", "Squeeze", "Unsqueeze"}


def aliases_of(proto: onnx.ModelProto, name: str) -> list[str]:
    """Values that a value was moved from. Whether they have the same channels, who asks for them sees by the number."""
    makers = {output: node for node in proto.graph.node for output in node.output}
    found: list[str] = []
    while (node := makers.get(name)) is not None and node.op_type in _MOVES_ROWS and not node.domain:
        name = node.input[0]
        found.append(name)
    return found


def instrument(proto: onnx.ModelProto, names: Sequence[str], kept: frozenset[str] = frozenset()) -> None:
    """Add three outputs for each value: the largest absolute value and the sum of squares of each channel, the number
    of rows; and the rows, of those that are to be kept."""
    graph = proto.graph
    opset = next(entry.version for entry in proto.opset_import if entry.domain in ("", "ai.onnx"))

    def constant(name: str, values: Any) -> str:
        graph.initializer.append(numpy_helper.from_array(np.asarray(values, np.int64), f"{MARK}.{name}"))
        return f"{MARK}.{name}"

    axis, one_row = constant("axis", [0]), constant("row", [1, 0, 0, 0])

    def node(op_type: str, inputs: list[str], output: str, **attributes: Any) -> str:
        graph.node.append(helper.make_node(op_type, inputs, [output], name=output, **attributes))
        return output

    def reduced(op_type: str, source: str, output: str) -> str:
        if opset >= 18 or op_type == "ReduceSum":
            return node(op_type, [source, axis], output, keepdims=0)
        return node(op_type, [source], output, axes=[0], keepdims=0)

    for number, name in enumerate(names):
        mark = f"{MARK}.{number}"
        rows = node("Flatten", [node("Cast", [name], f"{mark}.float", to=TensorProto.FLOAT)], f"{mark}.rows", axis=-1)
        # A row of zeros in front, which changes neither: an expert that got no token has no rows to reduce.
        padded = node("Pad", [rows, one_row], f"{mark}.padded")
        reduced("ReduceMax", node("Abs", [padded], f"{mark}.abs"), f"{mark}.amax")
        reduced("ReduceSum", node("Mul", [padded, padded], f"{mark}.squares"), f"{mark}.square")
        node("Shape", [rows], f"{mark}.shape")
        for part, kind in (("amax", TensorProto.FLOAT), ("square", TensorProto.FLOAT), ("shape", TensorProto.INT64)):
            graph.output.append(helper.make_tensor_value_info(f"{mark}.{part}", kind, [None]))
        if name in kept:
            graph.output.append(helper.make_tensor_value_info(rows, TensorProto.FLOAT, [None, None]))
