"""A model that holds one call of the op: float32 outside, T inside."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
from deltafuse.custom_ops.kda.body import build_function
from deltafuse.custom_ops.kda.call import attach, make_node
from deltafuse.custom_ops.kda.spec import KdaConfig
from numpy.typing import NDArray

FLOAT = ir.DataType.FLOAT
TYPES = {"float32": FLOAT, "float16": ir.DataType.FLOAT16, "bfloat16": ir.DataType.BFLOAT16}
STREAMS = ("q", "k", "v", "g", "beta", "gate", "conv_state")
Arrays = dict[str, NDArray[Any]]


def call_model(
    config: KdaConfig,
    inputs: Arrays,
    opset: int = 20,
    dtype: str = "float32",
    state_dtype: str = "float32",
    *,
    seq_len: int | None = None,
    dynamic: bool = True,
    ir_version: int = 8,
) -> onnx.ModelProto:
    """Graph inputs and outputs are float32 (not ``cu_seqlens``), cast to and from T and TS.

    ``dynamic``: batch and tokens are symbols, else the numbers of ``inputs``.
    """
    own = dict.fromkeys(STREAMS, TYPES[dtype]) | {"initial_state": TYPES[state_dtype]}
    nodes: list[ir.Node] = []

    def cast(value: ir.Value, to: ir.DataType, name: str) -> ir.Value:
        node = ir.node("Cast", [value], {"to": int(to)}, num_outputs=1)
        node.outputs[0].name = name
        nodes.append(node)
        return node.outputs[0]

    outside, operands = [], {}
    for name, array in inputs.items():
        shape: list[int | str] = list(array.shape)
        if dynamic and name in ("q", "k", "v", "g", "beta", "gate"):
            shape[:2] = [1 if config.has_cu_seqlens else "B", "T"]
        elif dynamic and name in ("conv_state", "initial_state"):
            shape[0] = "N" if config.has_cu_seqlens else "B"
        elif dynamic and name == "cu_seqlens":
            shape = ["N_plus_1"]
        kind = ir.DataType.from_numpy(array.dtype) if name == "cu_seqlens" else FLOAT
        value = ir.Value(name=name, type=ir.TensorType(kind), shape=ir.Shape(shape))
        outside.append(value)
        to = own.get(name, kind)
        operands[name] = value if to == kind else cast(value, to, f"{name}_cast")
    call = make_node(config, operands, TYPES[dtype], TYPES[state_dtype], seq_len=seq_len, name="kda")
    nodes.append(call)
    results = []
    for name, value in zip(config.output_names(), [y for y in call.outputs if y.name != ""], strict=True):
        value.name = f"{name}_call"
        result = cast(value, FLOAT, name)
        result.type, result.shape = ir.TensorType(FLOAT), value.shape
        results.append(result)
    graph = ir.Graph(outside, results, nodes=nodes, opset_imports={"": opset}, name="one_call")
    model = ir.Model(graph, ir_version=ir_version)
    attach(model, build_function(config, opset, TYPES[dtype], TYPES[state_dtype], seq_len=seq_len))
    return ir.to_proto(model)


def session(model: onnx.ModelProto) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def run(running: ort.InferenceSession, config: KdaConfig, inputs: Arrays) -> Arrays:
    """Outputs by name, float32."""
    feeds = {name: x if name == "cu_seqlens" else x.astype(np.float32) for name, x in inputs.items()}
    return dict(zip(config.output_names(), running.run(list(config.output_names()), feeds), strict=True))
