"""Models with fused experts and dense layers."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
from deltafuse.custom_ops.moe.body import build_function
from deltafuse.custom_ops.moe.call import attach, make_node
from deltafuse.custom_ops.moe.draw import draw_inputs
from deltafuse.custom_ops.moe.spec import MoeConfig
from numpy.typing import NDArray

Array = NDArray[Any]
FLOAT = ir.DataType.FLOAT
TYPES = {"float32": FLOAT, "float16": ir.DataType.FLOAT16, "bfloat16": ir.DataType.BFLOAT16}
CONFIG = MoeConfig(
    8, 2, 256, 128, 64, n_group=4, topk_group=2, norm_eps=1e-20, routed_scaling_factor=2.5, has_expert_bias=True
)


def layer_model(
    config: MoeConfig = CONFIG, dtype: str = "float32", opset: int = 20, *, layers: int = 2, tensors: Any = ir.tensor
) -> ir.Model:
    """Each layer: x + experts(x W1 + b) with a MatMul, then a Gemm with a turned weight, then a turned MatMul."""
    rng = np.random.default_rng(0)
    kind = TYPES[dtype]
    width = config.hidden_size
    x = ir.Value(name="x", type=ir.TensorType(kind), shape=ir.Shape(["N", width]))
    graph = ir.Graph([x], [], nodes=[], opset_imports={"": opset}, name="layers")
    model = ir.Model(graph, ir_version=10)

    def weight(name: str, array: Array) -> ir.Value:
        tensor = tensors(array)
        value = ir.Value(
            name=name, const_value=tensor, type=ir.TensorType(tensor.dtype), shape=ir.Shape(tensor.shape.numpy())
        )
        tensor.name = name
        graph.register_initializer(value)
        return value

    def dense(name: str) -> ir.Value:
        return weight(name, (rng.standard_normal((width, width)) / np.sqrt(width)).astype(kind.numpy()))

    def op(op_type: str, *inputs: ir.Value, **attributes: Any) -> ir.Value:
        node = ir.node(op_type, inputs, attributes, num_outputs=1, name=f"{op_type}_{len(graph)}")
        node.outputs[0].name = f"value_{len(graph)}"
        node.outputs[0].type, node.outputs[0].shape = ir.TensorType(kind), ir.Shape(["N", width])
        graph.append(node)
        return node.outputs[0]

    hidden = x
    for layer in range(layers):
        operands = draw_inputs(config, 1, rng, dtype=dtype, router_dtype=dtype)
        values = {name: weight(f"layer{layer}.{name}", array) for name, array in operands.items() if name != "x"}
        projected = op("MatMul", hidden, dense(f"layer{layer}.in"))
        call = make_node(config, {"x": projected, **values}, kind, name=f"layer{layer}.moe")
        call.outputs[0].name = f"layer{layer}.y"
        graph.append(call)
        turned = dense(f"layer{layer}.gemm")
        bias = weight(f"layer{layer}.bias", np.zeros(width, kind.numpy()))
        mixed = op("Gemm", call.outputs[0], turned, bias, transB=1)
        last = op("Transpose", dense(f"layer{layer}.out"), perm=[1, 0])
        last.shape = ir.Shape([width, width])
        hidden = op("Add", hidden, op("MatMul", mixed, last))
    hidden.name = "y"
    graph.outputs.append(hidden)
    attach(model, build_function(config, opset, kind))
    return model


def run(model: ir.Model, x: Array) -> Array:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    # ORT's MatMulNBits, which it makes of DequantizeLinear and MatMul, rounds activations to 8 bits otherwise
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
    data = ir.to_proto(model).SerializeToString()
    session = ort.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    result: Array = session.run(None, {"x": x})[0]
    return result
