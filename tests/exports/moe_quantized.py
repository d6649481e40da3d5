"""Experts' weights quantized in an exported graph, as tools that write `DequantizeLinear` leave them."""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

_TYPES = {
    "int4": (TensorProto.INT4, ml_dtypes.int4, -8, 7),
    "uint4": (TensorProto.UINT4, ml_dtypes.uint4, 0, 15),
    "int8": (TensorProto.INT8, np.int8, -128, 127),
    "uint8": (TensorProto.UINT8, np.uint8, 0, 255),
    "float8": (TensorProto.FLOAT8E4M3FN, ml_dtypes.float8_e4m3fn, -448, 448),
}


def input_axis(model: onnx.ModelProto, name: str) -> int | None:
    """The axis of a constant that a matrix product sums over; None where it is no weight of an expert."""
    ranks = {t.name: len(t.dims) for t in model.graph.initializer}
    for node in model.graph.node:
        if name not in node.input or ranks[name] < 2:
            continue
        if node.op_type == "Gemm" and node.input[1] == name:
            return 1
        if node.op_type == "MatMul" and node.input[1] == name:
            return ranks[name] - 2
        if node.op_type in ("Einsum", "GatherND", "Gather") and ranks[name] == 3:
            return 2
    return None


def quantized(
    kind: str, block: int = 0, *, zero_point: bool = False, per: str = "channel"
) -> Callable[..., onnx.ModelProto]:
    """A step that quantizes all experts' weights of a model.

    Args:
        kind: what the numbers are stored as.
        block: input channels that share a scale; 0: as ``per`` says.
        zero_point: asymmetric.
        per: "channel": a scale for each output channel of a two-dimensional weight; "tensor": one for all.
    """

    def step(model: onnx.ModelProto) -> onnx.ModelProto:
        graph = model.graph
        made = []
        for tensor in list(graph.initializer):
            axis = input_axis(model, tensor.name)
            if axis is None or "gate.weight" in tensor.name or tensor.data_type != TensorProto.FLOAT:
                continue
            weights = numpy_helper.to_array(tensor)
            stored, scale, zero, where = _quantize(weights, axis, kind, block, zero_point, per)
            dtype = _TYPES[kind][1]
            graph.initializer.remove(tensor)
            name = tensor.name
            graph.initializer.append(numpy_helper.from_array(stored.astype(dtype), f"{name}_stored"))
            graph.initializer.append(numpy_helper.from_array(scale.astype(np.float32), f"{name}_scale"))
            inputs = [f"{name}_stored", f"{name}_scale"]
            if zero is not None:
                graph.initializer.append(numpy_helper.from_array(zero.astype(dtype), f"{name}_zero"))
                inputs.append(f"{name}_zero")
            attributes = {"axis": where, **({"block_size": block} if block else {})}
            made.append(helper.make_node("DequantizeLinear", inputs, [name], name=f"{name}_dequantize", **attributes))
        for node in reversed(made):
            graph.node.insert(0, node)
        return model

    return step


def gathered(kind: str, block: int) -> Callable[..., onnx.ModelProto]:
    """A step that quantizes stacked weights which are gathered for each choice, and dequantizes what was gathered."""

    def step(model: onnx.ModelProto) -> onnx.ModelProto:
        graph = model.graph
        tensors = {t.name: t for t in graph.initializer}
        nodes = []
        for node in graph.node:
            tensor = tensors.get(node.input[0]) if node.op_type == "GatherND" else None
            if tensor is None or len(tensor.dims) != 3:
                nodes.append(node)
                continue
            stored, scale, _, axis = _quantize(numpy_helper.to_array(tensor), 2, kind, block, False, "")
            graph.initializer.remove(tensor)
            parts = []
            for part, array in (("stored", stored.astype(_TYPES[kind][1])), ("scale", scale.astype(np.float32))):
                name = f"{tensor.name}_{part}"
                graph.initializer.append(numpy_helper.from_array(array, name))
                parts.append(f"{node.output[0]}_{part}")
                nodes.append(helper.make_node("GatherND", [name, node.input[1]], [parts[-1]], name=parts[-1]))
            name = f"{node.output[0]}_dequantize"
            nodes.append(
                helper.make_node(
                    "DequantizeLinear", parts, [node.output[0]], name=name, axis=axis - 3, block_size=block
                )
            )
        del graph.node[:]
        graph.node.extend(nodes)
        return model

    return step


#: How :func:`scaled_by_hand` writes scales.
BY_HAND = ("repeated", "blocked", "baked", "gathered", "turned")


def scaled_by_hand(style: str, block: int) -> Callable[[onnx.ModelProto], onnx.ModelProto]:
    """A step that holds experts' weights as float8 with a scale for each block by block, cast and multiplied.

    ``style``: "repeated": scales are repeated along both axes; "blocked": weights are cut into blocks by a reshape;
    "baked": an optimiser has repeated the scales; "gathered": by an index; "turned": as "repeated", then transposed.
    """

    def step(model: onnx.ModelProto) -> onnx.ModelProto:
        graph = model.graph
        made: list[onnx.NodeProto] = []
        for tensor in list(graph.initializer):
            if input_axis(model, tensor.name) is None or "gate.weight" in tensor.name or len(tensor.dims) != 2:
                continue
            weights = numpy_helper.to_array(tensor)
            graph.initializer.remove(tensor)
            made += _by_hand(graph, tensor.name, weights, style, block)
        for node in reversed(made):
            graph.node.insert(0, node)
        return model

    return step


def _by_hand(graph: onnx.GraphProto, name: str, weights: np.ndarray, style: str, block: int) -> list[onnx.NodeProto]:
    if style == "turned":
        weights = np.ascontiguousarray(weights.T)
    rows, cols = weights.shape
    cut = weights.reshape(rows // block, block, cols // block, block)
    scale = np.abs(cut).max((1, 3)).astype(np.float32) / 448 + np.float32(1e-6)
    stored = (cut / scale[:, None, :, None]).reshape(rows, cols).astype(ml_dtypes.float8_e4m3fn)
    nodes: list[onnx.NodeProto] = []

    def const(part: str, array: np.ndarray) -> str:
        graph.initializer.append(numpy_helper.from_array(array, f"{name}_{part}"))
        return f"{name}_{part}"

    def op(kind: str, *inputs: str, to: str = "", **attributes: object) -> str:
        output = to or f"{name}_{kind}_{len(nodes)}"
        nodes.append(helper.make_node(kind, inputs, [output], name=output, **attributes))
        return output

    def ints(*numbers: int) -> str:
        return const(f"ints_{len(nodes)}_{len(numbers)}", np.array(numbers, np.int64))

    wide = f"{name}_wide"
    nodes.append(helper.make_node("Cast", [const("stored", stored)], [wide], name=wide, to=TensorProto.FLOAT))
    if style == "blocked":
        wide = op("Reshape", wide, ints(rows // block, block, cols // block, block))
        product = op("Mul", wide, op("Unsqueeze", const("scale", scale), const("axes", np.array([1, 3]))))
        op("Reshape", product, ints(rows, cols), to=name)
        return nodes
    if style == "gathered":
        spread = op("Gather", const("scale", scale), const("rows", np.arange(rows) // block), axis=0)
        spread = op("Gather", spread, const("cols", np.arange(cols) // block), axis=1)
    elif style == "baked":
        half = np.repeat(np.repeat(scale, block, 0)[..., None], block, 2)
        spread = op("Reshape", const("scale", half), ints(rows, cols))
    else:
        spread = op("Unsqueeze", const("scale", scale), const("axes", np.array([1, 3])))
        spread = op("Expand", spread, ints(rows // block, block, cols // block, block))
        spread = op("Reshape", spread, ints(rows, cols))
    if style == "turned":
        op("Transpose", op("Mul", spread, wide), to=name, perm=[1, 0])
    else:
        op("Mul", wide, spread, to=name)
    return nodes


def _quantize(
    weights: np.ndarray, axis: int, kind: str, block: int, asymmetric: bool, per: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None, int]:
    """(stored, scale, zero point, axis of `DequantizeLinear`)."""
    _, _, low, high = _TYPES[kind]
    if block:
        moved = np.moveaxis(weights, axis, -1)
        parts = moved.reshape(*moved.shape[:-1], -1, block)
        scale, zero = _scale(parts, (-1,), low, high, asymmetric)
        stored = _stored(parts, scale, zero, kind, low, high).reshape(moved.shape)
        back = lambda a: np.ascontiguousarray(np.moveaxis(a, -1, axis))  # noqa: E731
        return back(stored), back(scale[..., 0]), None if zero is None else back(zero[..., 0]), axis
    if per == "tensor" or weights.ndim != 2:
        scale, zero = _scale(weights, tuple(range(weights.ndim)), low, high, asymmetric)
        stored = _stored(weights, scale, zero, kind, low, high)
        return stored, scale.reshape(()), None if zero is None else zero.reshape(()), 1
    scale, zero = _scale(weights, (axis,), low, high, asymmetric)
    stored = _stored(weights, scale, zero, kind, low, high)
    return stored, scale.reshape(-1), None if zero is None else zero.reshape(-1), 1 - axis


def _scale(
    weights: np.ndarray, axes: tuple[int, ...], low: int, high: int, asymmetric: bool
) -> tuple[np.ndarray, np.ndarray | None]:
    if asymmetric:
        least, most = (np.minimum(weights.min(axes, keepdims=True), 0), np.maximum(weights.max(axes, keepdims=True), 0))
        scale = np.maximum((most - least) / (high - low), 1e-8)
        return scale, np.clip(np.round(low - least / scale), low, high)
    return np.maximum(np.abs(weights).max(axes, keepdims=True) / high, 1e-8), None


def _stored(
    weights: np.ndarray, scale: np.ndarray, zero: np.ndarray | None, kind: str, low: int, high: int
) -> np.ndarray:
    numbers = weights / scale + (0 if zero is None else zero)
    return np.clip(numbers if kind == "float8" else np.round(numbers), low, high)
