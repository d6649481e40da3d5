"""The nodes that stand for a candidate: operands brought to the op's layout, the call, its results brought back.

The proof runs exactly these nodes, and the rewrite splices exactly these nodes in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from ..custom_ops.common.parts_tensor import PartsTensor
from ..custom_ops.common.refusal import Refusal
from .candidate import Candidate, Operand, Parameter, Result
from .graph import GraphView
from .op import FLOAT
from .parameters import is_float, parameter_array

Names = Callable[[str], str]
#: A parameter for the new nodes: an array, a tensor that is computed when it is read, or a value of the graph itself.
Given = np.ndarray | ir.TensorProtocol | ir.Value


@dataclass
class Replacement:
    """New nodes in order, the initializers they need, and the values that stand for the candidate's targets."""

    nodes: list[ir.Node] = field(default_factory=list)
    initializers: list[ir.Value] = field(default_factory=list)
    outputs: dict[ir.Value, ir.Value] = field(default_factory=dict)
    function: ir.Function | None = None


class _Builder:
    def __init__(self, names: Names, prefix: str) -> None:
        self.names, self.prefix = names, prefix
        self.result = Replacement()

    def initializer(self, hint: str, array: np.ndarray | ir.TensorProtocol) -> ir.Value:
        name = self.names(f"{self.prefix}.{hint}")
        tensor = ir.tensor(array) if isinstance(array, np.ndarray) else array
        tensor.name = name
        shape = ir.Shape(list(tensor.shape.numpy()))
        value = ir.Value(name=name, shape=shape, type=ir.TensorType(tensor.dtype), const_value=tensor)
        self.result.initializers.append(value)
        return value

    def node(
        self, hint: str, op_type: str, inputs: list[ir.Value], attributes: dict | None = None, outputs: int = 1
    ) -> ir.Node:
        node = ir.node(op_type, inputs, attributes or {}, num_outputs=outputs, name=self.names(f"{self.prefix}.{hint}"))
        for i, value in enumerate(node.outputs):
            value.name = self.names(f"{self.prefix}.{hint}_{i}" if outputs > 1 else f"{self.prefix}.{hint}")
        self.result.nodes.append(node)
        return node

    def apply(self, hint: str, op_type: str, inputs: list[ir.Value], attributes: dict | None = None) -> ir.Value:
        value = self.node(hint, op_type, inputs, attributes).outputs[0]
        if inputs[0].dtype is not None:
            value.dtype = inputs[0].dtype
        return value

    def cast(self, hint: str, value: ir.Value, dtype: ir.DataType) -> ir.Value:
        if value.dtype == dtype:
            return value
        cast = self.apply(f"{hint}_cast", "Cast", [value], {"to": dtype.value})
        cast.dtype = dtype
        return cast

    def operand(
        self, name: str, operand: Operand, bind: Mapping[ir.Value, ir.Value], dtype: ir.DataType | None
    ) -> ir.Value:
        parts: list[ir.Value] = []
        for i, piece in enumerate(operand.pieces):
            value = bind[piece.value]
            hint = name if len(operand.pieces) == 1 else f"{name}{i}"
            if piece.permutation is not None:
                value = self.apply(f"{hint}_transposed", "Transpose", [value], {"perm": list(piece.permutation)})
            if piece.reshape is not None:
                shape = self.initializer(f"{hint}_shape", np.array(piece.reshape, np.int64))
                value = self.apply(f"{hint}_rows", "Reshape", [value, shape])
            if piece.each_row_of is not None:
                rows = self.apply(f"{hint}_count", "Shape", [bind[piece.each_row_of]], {"start": 0, "end": 1})
                rows.dtype = ir.DataType.INT64
                value = self.apply(f"{hint}_each", "Expand", [value, rows])
            if dtype is not None:
                value = self.cast(hint, value, dtype)
            parts.append(value)
        whole = parts[0] if len(parts) == 1 else self.apply(f"{name}_all", "Concat", parts, {"axis": operand.axis})
        if operand.reshape is None:
            return whole
        shape = self.initializer(f"{name}_shape", np.array(operand.reshape, np.int64))
        return self.apply(f"{name}_flat", "Reshape", [whole, shape])

    def results(self, name: str, result: Result, value: ir.Value, cast: bool) -> None:
        if result.reshape is not None:
            shape = self.initializer(f"{name}_shape", np.array(result.reshape, np.int64))
            value = self.apply(f"{name}_heads", "Reshape", [value, shape])
        if result.permutation is not None:
            value = self.apply(f"{name}_transposed", "Transpose", [value], {"perm": list(result.permutation)})
        values = [value]
        if len(result.targets) > 1:
            sizes = self.initializer(f"{name}_sizes", np.array(result.sizes, np.int64))
            node = self.node(f"{name}_split", "Split", [value, sizes], {"axis": result.axis}, len(result.targets))
            values = list(node.outputs)
            for part in values:
                if value.dtype is not None:
                    part.dtype = value.dtype
        for i, (target, new) in enumerate(zip(result.targets, values, strict=True)):
            if cast and target.dtype is not None:
                new = self.cast(f"{name}{i}_result", new, target.dtype)
            if target.shape is not None:
                new.shape = target.shape
            self.result.outputs[target] = new


def type_refusal(candidate: Candidate) -> Refusal | None:
    """Why the op does not take the graph's element types, or None: float64 would lose half of its digits."""
    for value in [*candidate.input_values(), *candidate.output_values()]:
        if value.dtype == ir.DataType.DOUBLE:
            return Refusal(
                "dtype",
                f"{value.name!r} is float64: the op takes float32, float16 and bfloat16, and computes in float32",
            )
    return None


def replacement(
    candidate: Candidate,
    bind: Mapping[ir.Value, ir.Value],
    parameters: Mapping[str, Given],
    names: Names,
    prefix: str,
    opset: int,
    *,
    float32: bool = False,
) -> Replacement:
    """Build the nodes.

    Args:
        bind: for each of the candidate's input values, the value to read.
        parameters: the op's parameters, in the types that the call needs.
        names: makes a name unique in the graph.
        opset: the model's default-domain opset, which the function body is written for.
        float32: build for a graph whose floats are all float32, as proofs run it.
    """
    builder = _Builder(names, prefix)
    op = candidate.op
    dtype = FLOAT if float32 else op.element_type(candidate)
    state = FLOAT if float32 else op.state_type(candidate)
    inputs: dict[str, ir.Value] = {}
    for name, operand in candidate.operands.items():
        want = {"T": dtype, "TS": state, "float32": FLOAT}.get(op.kind_of(name))
        inputs[name] = builder.operand(name, operand, bind, want)
    for name, given in parameters.items():
        inputs[name] = given if isinstance(given, ir.Value) else builder.initializer(name, given)
    function, node, outputs = op.make_call(candidate, inputs, opset, dtype, state, prefix)
    for name, value in outputs.items():
        value.name = names(f"{prefix}.{name}")
    builder.result.nodes.append(node)
    builder.result.function = function
    for name, result in candidate.results.items():
        builder.results(name, result, outputs[name], cast=not float32)
    return builder.result


def given_parameters(view: GraphView, candidate: Candidate) -> dict[str, Given]:
    """The parameters of a rewrite: graph values as they stand, computed arrays, large ones computed when they are read.

    Raises:
        ProofImpossible: a constant that can't be the parameter it should be.
    """
    op = candidate.op
    kinds = {"T": op.element_type(candidate), "TS": op.state_type(candidate), "float32": FLOAT}
    found: dict[str, Given] = {}
    for name, parameter in candidate.parameters.items():
        want = parameter.dtype or kinds.get(op.kind_of(name))
        source = parameter.sources[0] if parameter.sources else None
        if source is not None and parameter.compute is None and (want is None or source.dtype == want):
            found[name] = source
        elif parameter.shape is None or any(s.producer() is not None for s in parameter.sources):
            found[name] = _in_type(parameter_array(view, name, parameter), want)
        else:
            if want is None and source is not None:
                want = source.dtype
            assert want is not None
            if parameter.part is not None:
                found[name] = PartsTensor(parameter.part, want, parameter.shape)
                continue
            found[name] = ir.LazyTensor(_Compute(view, name, parameter, want), want, ir.Shape(parameter.shape))
    return found


def _in_type(array: np.ndarray, dtype: ir.DataType | None) -> np.ndarray:
    return array if dtype is None or not is_float(array.dtype) else array.astype(dtype.numpy())


@dataclass(frozen=True)
class _Compute:
    """Makes a large parameter when it is asked for. The graph's constants behind it outlive their nodes."""

    view: GraphView
    name: str
    parameter: Parameter
    dtype: ir.DataType

    def __call__(self) -> ir.TensorProtocol:
        array = _in_type(parameter_array(self.view, self.name, self.parameter), self.dtype)
        return ir.tensor(array, dtype=self.dtype)
