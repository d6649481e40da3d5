"""What a model takes and gives, and what each input is for: tokens, positions, a mask, a state."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto

from .capture_device import numpy_type
from .capture_states import pair_states
from .errors import NotOnnxError, OptionError
from .onnx_file import check_file

Dim = int | str | None  # a size, a symbol or an expression of symbols, or unknown

_POSITIONS = re.compile(r"(^|[._/])(pos|positions?|position_?ids|cache_position|start_pos|offsets?)$", re.IGNORECASE)
_MASK = re.compile(r"mask", re.IGNORECASE)
_LENGTH = re.compile(r"(seq|past|total|sequence|context)[a-z_]*len|seqlens", re.IGNORECASE)
_STATE = re.compile(r"past|cache|state|key_values", re.IGNORECASE)
#: Ops through which an index stays the index that it is.
KEEPS_INDEX = {"Cast", "Reshape", "Unsqueeze", "Squeeze", "Identity", "Flatten", "Expand", "Transpose", "Clip"}
#: Ops that choose by scores, and ONNX Runtime's and deltafuse's own nodes with experts.
_CHOOSE = {"TopK", "MoE", "QMoE", "GroupedQMoE"}
_KEEPS_TABLE = {"Cast", "Identity", "DequantizeLinear"}


@dataclass(frozen=True)
class Port:
    """One input or output: its name, ORT's name of its type, its declared shape, and an input's role.

    ``role``: "tokens", "positions", "mask", "length" (how many positions there are), "state" or "data".
    """

    name: str
    type: str
    shape: list[Dim]
    element: int
    role: str = ""

    @property
    def dtype(self) -> np.dtype[Any]:
        dtype: np.dtype[Any] = numpy_type(self.element)
        return dtype


@dataclass(frozen=True)
class Signature:
    """A model's inputs and outputs.

    Attributes:
        states: the states, input name -> name of the output that continues it.
        vocabulary: how many values the tokens of an input may have, where the model tells.
        half: the type of most of its large weights, where that is float16 or bfloat16, else "".
        chooses: does it choose by computed scores, as routers of experts do?
        quantized: does it hold weights of 8 bits or less?
    """

    inputs: dict[str, Port]
    outputs: dict[str, Port]
    states: dict[str, str]
    vocabulary: dict[str, int] = field(default_factory=dict)
    half: str = ""
    chooses: bool = False
    quantized: bool = False
    source: str = "the model"

    def of(self, role: str) -> list[Port]:
        """The inputs of this role."""
        return [port for port in self.inputs.values() if port.role == role]

    def symbols(self) -> set[str]:
        """The names of all sizes that inputs leave open."""
        sizes = {size for port in self.inputs.values() for size in port.shape if isinstance(size, str)}
        return {name for size in sizes for name in size_names(size)}

    @property
    def leading(self) -> Port | None:
        """The input that says how many sequences and tokens a step has: the tokens, else the first data."""
        return next(iter(self.of("tokens") + self.of("data")), None)


def read_signature(model: str | os.PathLike[str] | onnx.ModelProto) -> Signature:
    """The signature of a model in a file or in memory.

    Raises:
        ModelFileError: no such file, or no ONNX model.
        OptionError: an input that is not a tensor of numbers.
    """
    source = "the model"
    if not isinstance(model, onnx.ModelProto):
        source = os.fspath(model)
        check_file(Path(model))
        try:
            model = onnx.load(source, load_external_data=False)
        except Exception as error:  # protobuf's errors have no common base
            raise NotOnnxError(f"{source} is not an ONNX model, or is damaged: {error}") from error
    graph = model.graph
    given = {tensor.name for tensor in graph.initializer}
    inputs = [_port(value) for value in graph.input if value.name not in given]
    outputs = [_port(value) for value in graph.output]
    session = SimpleNamespace(get_inputs=lambda: inputs, get_outputs=lambda: outputs)
    states = pair_states(session, "auto")
    vocabulary = _vocabulary(graph)
    ports = [_with_role(port, states, vocabulary) for port in inputs]
    if not any(port.role in ("tokens", "data") for port in ports):  # paired by mistake: nothing would be left to feed
        states = {}
        ports = [_with_role(port, states, vocabulary) for port in inputs]
    tokens = {port.name for port in ports if port.role == "tokens"}
    return Signature(
        {port.name: port for port in ports},
        {port.name: port for port in outputs},
        states,
        {name: size for name, size in vocabulary.items() if name in tokens},
        _half(graph),
        any(node.op_type in _CHOOSE for node in (*graph.node, *(n for f in model.functions for n in f.node))),
        any(t.data_type in _NARROW and int(np.prod(t.dims)) >= _A_WEIGHT for t in graph.initializer),
        source,
    )


def size_names(size: str) -> list[str]:
    """The symbols of an expression such as ``past + 1``; the text itself where it is none."""
    try:
        tree = ast.parse(size, mode="eval")
    except SyntaxError:
        return [size]
    return [node.id for node in ast.walk(tree) if isinstance(node, ast.Name)]


def _port(value: onnx.ValueInfoProto) -> Port:
    kind = value.type.WhichOneof("value")
    if kind != "tensor_type" or value.type.tensor_type.elem_type == TensorProto.STRING:
        raise OptionError(f"{value.name} is no tensor of numbers ({kind}): such models cannot be run here")
    tensor = value.type.tensor_type
    shape: list[Dim] = []
    for dim in tensor.shape.dim:
        text = dim.dim_param
        shape.append(int(text) if text.isdigit() else text or (dim.dim_value if dim.HasField("dim_value") else None))
    names: dict[int, str] = {TensorProto.FLOAT: "float", TensorProto.DOUBLE: "double", TensorProto.FLOAT16: "float16"}
    name = names.get(tensor.elem_type, TensorProto.DataType.Name(tensor.elem_type).lower())
    return Port(value.name, f"tensor({name})", shape, tensor.elem_type)


def _with_role(port: Port, states: Mapping[str, str], vocabulary: Mapping[str, int]) -> Port:
    if port.name in states or (_STATE.search(port.name) and len(port.shape) >= 3 and _is_float(port)):
        role = "state"
    elif _MASK.search(port.name):
        role = "mask"
    elif _is_float(port):
        role = "data"
    elif _POSITIONS.search(port.name):
        role = "positions"
    elif _LENGTH.search(port.name):
        role = "length"
    elif port.element == TensorProto.BOOL:
        role = "mask"
    else:
        role = "tokens"
    return Port(port.name, port.type, port.shape, port.element, role)


def _is_float(port: Port) -> bool:
    return port.element in (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE)


def _vocabulary(graph: onnx.GraphProto) -> dict[str, int]:
    """Inputs that look rows of a table up, and how many rows that has (the fewest, of several tables)."""
    tables = {tensor.name: list(tensor.dims) for tensor in graph.initializer if len(tensor.dims) >= 2}
    index_of = {value.name: value.name for value in graph.input}
    found: dict[str, int] = {}
    for node in graph.node:
        if node.op_type == "Constant" and node.output and node.attribute and node.attribute[0].HasField("t"):
            if len(node.attribute[0].t.dims) >= 2:
                tables[node.output[0]] = list(node.attribute[0].t.dims)
            continue
        if not node.input or not node.output:
            continue
        first = node.input[0]
        if node.op_type in _KEEPS_TABLE and first in tables:
            tables[node.output[0]] = tables[first]
        elif node.op_type in KEEPS_INDEX and first in index_of:
            index_of[node.output[0]] = index_of[first]
        elif node.op_type in ("Gather", "GatherBlockQuantized") and first in tables and len(node.input) > 1:
            axis = next((a.i for a in node.attribute if a.name in ("axis", "gather_axis")), 0)
            name = index_of.get(node.input[1])
            if name is not None and axis == 0:
                found[name] = min(found.get(name, tables[first][0]), tables[first][0])
    return found


#: Types of quantized weights, and how many numbers are no scales, masks or shapes.
_NARROW = {
    *(TensorProto.INT4, TensorProto.UINT4, TensorProto.INT8, TensorProto.UINT8),
    *(TensorProto.FLOAT8E4M3FN, TensorProto.FLOAT8E5M2),
}
_A_WEIGHT = 1024


def _half(graph: onnx.GraphProto) -> str:
    sizes = {TensorProto.FLOAT: 0, TensorProto.FLOAT16: 0, TensorProto.BFLOAT16: 0}
    for tensor in graph.initializer:
        if tensor.data_type in sizes:
            sizes[tensor.data_type] += int(np.prod(tensor.dims)) if tensor.dims else 1
    most = max(sizes, key=lambda kind: sizes[kind])
    return {TensorProto.FLOAT16: "float16", TensorProto.BFLOAT16: "bfloat16"}.get(most, "")
