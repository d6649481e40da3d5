"""float8 weights whose scales are multiplied in by hand, as `DequantizeLinear` while blocks are looked for.

Models quantized in blocks of 128 by 128 mostly leave PyTorch as a cast and a product, the scales repeated or the
weights cut into blocks by a reshape. Every such product of a constant is written as `DequantizeLinear` of the same
numbers: for each row one scale a block. What no fused node takes in is put back as it was.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from ..graph import FLOAT_TYPES, GraphView, attribute_int, attribute_ints, is_op, static_dims
from ..rewrite import remove_unused

#: The opset from which `DequantizeLinear` knows blocks.
OPSET = 21
#: Scales spread over the weights are looked at up to so many elements.
LIMIT = 1 << 28
#: The smallest block that is worth its scales.
_LEAST = 8
_MOVES = ("Reshape", "Squeeze", "Unsqueeze", "Identity")


@dataclass(frozen=True)
class _Scaled:
    """The product ``value``, in the shape of the stored float8 numbers, and the scale of each of them."""

    value: ir.Value
    stored: ir.Value
    scales: np.ndarray


class ScaledWeights:
    """Rewrites the products of a model, and puts those back that are still read."""

    def __init__(self, model: ir.Model) -> None:
        self._model = model
        self._made: list[tuple[ir.Value, ir.Value]] = []

    def rewrite(self) -> int:
        """Write products as `DequantizeLinear`. Returns how many; the model's opset may be too old for any."""
        graph = self._model.graph
        stored = any(v.dtype == ir.DataType.FLOAT8E4M3FN for v in graph.initializers.values())
        if not stored or graph.opset_imports.get("", 0) < OPSET:
            return 0
        view = GraphView(graph)
        products = [n for n in graph if is_op(n, "Mul") and view.is_const(n.outputs[0])]
        ready, sizes = [], Counter[int]()
        for node in products:
            found = _scaled(view, node)
            if found is None:
                continue
            axis = _input_axis(view, found.value)
            scales, size = found.scales, _block(found.scales, axis)
            if size is None:
                continue
            sizes[size] += 1
            ready.append((found, axis, size, np.ascontiguousarray(_every(scales, axis, size))))
        common = max((s for s in sizes if s), key=sizes.__getitem__, default=0)
        for number, (found, axis, size, scales) in enumerate(ready):
            # rows with one scale are in the blocks of the others
            length = int(found.value.shape[axis])  # type: ignore[index, arg-type]
            block = size or common or length
            repeats = 1 if size else -(-length // block)
            self._write(number, found, axis, block, np.repeat(scales, repeats, axis=axis))
        return len(self._made)

    def _write(self, number: int, found: _Scaled, axis: int, size: int, scales: np.ndarray) -> None:
        graph, value = self._model.graph, found.value
        name = f"{value.name}__scales_{number}"
        tensor = ir.tensor(np.ascontiguousarray(scales), name=name)
        scale = ir.Value(name=name, const_value=tensor, type=ir.TensorType(tensor.dtype), shape=ir.Shape(scales.shape))
        graph.register_initializer(scale)
        attributes = {"axis": axis, "block_size": size}
        node = ir.node("DequantizeLinear", [found.stored, scale], attributes, num_outputs=1, name=f"{name}_dequantize")
        made = node.outputs[0]
        made.name, made.type, made.shape = f"{value.name}__dequantized_{number}", value.type, value.shape
        producer = value.producer()
        assert producer is not None
        graph.insert_after(producer, node)
        value.replace_all_uses_with(made)
        graph.outputs.append(value)  # so that nobody drops it
        self._made.append((value, made))

    def restore(self) -> None:
        """Let what still reads a rewritten product read it as it was."""
        outputs = self._model.graph.outputs
        for value, made in self._made:
            made.replace_all_uses_with(value)
            outputs.pop(next(i for i, v in enumerate(outputs) if v is value))
        if self._made:
            remove_unused(self._model)
        self._made = []


def _scaled(view: GraphView, node: ir.Node) -> _Scaled | None:
    """Float8 numbers times scales, from the product on to where it has their shape again."""
    for weights, scales in (node.inputs, node.inputs[::-1]):
        stored = _stored(weights)
        product = static_dims(node.outputs[0])
        if stored is None or scales is None or product is None or None in product:
            continue
        if product != static_dims(weights) or node.outputs[0].dtype not in FLOAT_TYPES:  # type: ignore[arg-type]
            continue
        value = _in_shape(node.outputs[0], static_dims(stored))
        if value is None or math.prod(d or 0 for d in product) > LIMIT:
            continue
        numbers = _array(view, scales)
        if numbers is None or numbers.dtype != node.outputs[0].dtype.numpy():
            continue
        spread = np.broadcast_to(numbers, [d or 0 for d in product]).reshape(
            [d or 0 for d in static_dims(stored) or []]
        )
        return _Scaled(value, stored, spread)
    return None


def _stored(value: ir.Value | None) -> ir.Value | None:
    """The float8 initializer that a value is, cast and in another shape."""
    cast = False
    while value is not None and (producer := value.producer()) is not None:
        if is_op(producer, "Cast"):
            cast = True
        elif not is_op(producer, *_MOVES):
            return None
        value = producer.inputs[0]
    known = value is not None and value.const_value is not None and not value.is_graph_input()
    return value if cast and known and value.dtype == ir.DataType.FLOAT8E4M3FN else None  # type: ignore[union-attr]


def _in_shape(value: ir.Value, dims: list[int | None] | None) -> ir.Value | None:
    """The value, or what it is reshaped to, in this shape."""
    while static_dims(value) != dims:
        users = [use.node for use in value.uses()]
        if len(users) != 1 or not is_op(users[0], *_MOVES) or value.is_graph_output():
            return None
        value = users[0].outputs[0]
    return None if value.is_graph_output() else value


def _array(view: GraphView, value: ir.Value) -> np.ndarray | None:
    """A constant's elements, moved and spread; without the limit that other constants have."""
    producer = value.producer()
    if producer is None:
        return None if value.const_value is None or value.is_graph_input() else value.const_value.numpy()
    if not is_op(producer, "Expand", "Transpose", "Tile", "Gather", "Cast", *_MOVES):
        return view.array(value)
    inner = None if producer.inputs[0] is None else _array(view, producer.inputs[0])
    dims = static_dims(value)
    if inner is None or dims is None or None in dims:
        return None
    shape = [d or 0 for d in dims]
    if is_op(producer, "Cast"):
        return inner.astype(value.dtype.numpy()) if value.dtype in FLOAT_TYPES else None
    if is_op(producer, "Expand"):
        return np.broadcast_to(inner, shape)
    if is_op(producer, "Transpose"):
        perm = producer.attributes.get("perm")
        return np.transpose(inner, None if perm is None else list(perm.as_ints()))
    if is_op(producer, "Tile", "Gather"):
        given = view.array(producer.inputs[1])
        if given is None:
            return None
        if is_op(producer, "Tile"):
            return np.tile(inner, [int(i) for i in given])
        return np.take(inner, given.astype(np.int64), axis=attribute_int(producer, "axis", 0))
    return inner.reshape(shape)


def _input_axis(view: GraphView, value: ir.Value) -> int:
    """The axis of weights that products sum over: the last, but for right operands that are not turned."""
    rank = len(value.shape or ())
    for user in view.users(value):
        right = len(user.inputs) > 1 and user.inputs[1] is value
        if right and (is_op(user, "MatMul") or (is_op(user, "Gemm") and not attribute_int(user, "transB", 0))):
            return rank - 2
        if is_op(user, "Transpose"):
            perm = attribute_ints(user, "perm") or list(range(rank))[::-1]
            return perm[_input_axis(view, user.outputs[0])]
    return rank - 1


def _block(scales: np.ndarray, axis: int) -> int | None:
    """How many entries along an axis share a scale, 0: all of them; None where scales change too often."""
    along = np.moveaxis(scales, axis, -1)
    changes = np.flatnonzero(np.any((along[..., 1:] != along[..., :-1]).reshape(-1, along.shape[-1] - 1), axis=0)) + 1
    size = math.gcd(*(int(i) for i in changes))
    return size if size == 0 or size >= _LEAST else None


def _every(scales: np.ndarray, axis: int, size: int) -> np.ndarray:
    """One scale a block."""
    return np.take(scales, range(0, scales.shape[axis], size or scales.shape[axis]), axis=axis)
