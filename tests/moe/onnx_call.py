"""A model that holds one call of the op; its inputs and outputs are of the op's own types, but no bfloat16."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
from deltafuse.custom_ops.moe.body import build_function
from deltafuse.custom_ops.moe.call import attach, make_node
from deltafuse.custom_ops.moe.spec import MoeConfig
from numpy.typing import NDArray

FLOAT = ir.DataType.FLOAT
TYPES = {"float32": FLOAT, "float16": ir.DataType.FLOAT16, "bfloat16": ir.DataType.BFLOAT16}
STREAMS = ("x", "router_logits")
Arrays = dict[str, NDArray[Any]]


def call_model(
    config: MoeConfig, inputs: Arrays, opset: int = 20, dtype: str = "float32", *, dynamic: bool = True
) -> onnx.ModelProto:
    """Tokens are graph inputs (float32 for bfloat16), the rest initializers. ``dynamic``: token counts are symbols."""
    nodes: list[ir.Node] = []
    outside, initializers, operands = [], [], {}

    def cast(value: ir.Value, to: ir.DataType, name: str) -> ir.Value:
        node = ir.node("Cast", [value], {"to": int(to)}, num_outputs=1)
        node.outputs[0].name = name
        nodes.append(node)
        return node.outputs[0]

    for name, array in inputs.items():
        if name not in STREAMS:
            value = ir.Value(name=name, const_value=ir.tensor(array, name=name))
            value.type, value.shape = ir.TensorType(ir.DataType.from_numpy(array.dtype)), ir.Shape(array.shape)
            initializers.append(value)
            operands[name] = value
            continue
        shape: list[int | str] = list(array.shape)
        if dynamic:
            shape[:-1] = ["N"] if array.ndim == 2 else ["B", "S"]
        kind = ir.DataType.from_numpy(array.dtype)
        wide = FLOAT if kind == ir.DataType.BFLOAT16 else kind
        value = ir.Value(name=name, type=ir.TensorType(wide), shape=ir.Shape(shape))
        outside.append(value)
        operands[name] = value if wide == kind else cast(value, kind, f"{name}_cast")
    call = make_node(config, operands, TYPES[dtype], name="moe")
    nodes.append(call)
    results = []
    for name, value in zip(config.output_names(), call.outputs, strict=True):
        value.name = name
        if name == "y" and dtype == "bfloat16":
            value.name = "y_call"
            wide_y = cast(value, FLOAT, "y")
            wide_y.type, wide_y.shape = ir.TensorType(FLOAT), value.shape
            value = wide_y
        results.append(value)
    graph = ir.Graph(
        outside, results, nodes=nodes, initializers=initializers, opset_imports={"": opset}, name="one_call"
    )
    model = ir.Model(graph, ir_version=10)
    attach(model, build_function(config, opset, TYPES[dtype]))
    return ir.to_proto(model)


def session(model: onnx.ModelProto, **entries: str) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    for name, value in entries.items():
        options.add_session_config_entry(name, value)
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def run(running: ort.InferenceSession, config: MoeConfig, inputs: Arrays) -> Arrays:
    """Outputs by name."""
    feeds = {name: x for name, x in inputs.items() if name in STREAMS}
    feeds = {name: x.astype(np.float32) if x.dtype == ml_dtypes.bfloat16 else x for name, x in feeds.items()}
    return dict(zip(config.output_names(), running.run(list(config.output_names()), feeds), strict=True))
