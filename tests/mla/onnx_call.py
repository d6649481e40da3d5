"""A model that holds one call of the op: float32 outside where T is bfloat16, else T."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
from deltafuse.custom_ops.mla.body import build_function
from deltafuse.custom_ops.mla.call import attach, make_node
from deltafuse.custom_ops.mla.spec import MlaConfig
from numpy.typing import NDArray

FLOAT = ir.DataType.FLOAT
TYPES = {"float32": FLOAT, "float16": ir.DataType.FLOAT16, "bfloat16": ir.DataType.BFLOAT16}
Arrays = dict[str, NDArray[Any]]

#: Symbols of the operands' leading axes, where a model is dynamic. Static caches have a size of their own.
_AXES = {
    "q": {0: "B", 1: "S"},
    "latent": {0: "B", 1: "S"},
    "k_rope": {0: "B", 1: "S"},
    "gate": {0: "B", 1: "S"},
    "cos": {0: "B_cos", 1: "S"},
    "sin": {0: "B_cos", 1: "S"},
    "position_ids": {0: "B_ids", 1: "S"},
    "q_scale": {0: "B_scale", 1: "S"},
    "past_latent": {0: "B_or_blocks", 1: "P"},
    "past_k_rope": {0: "B_or_blocks", 1: "P"},
    "past_latent_scale": {0: "B_or_blocks", 1: "P"},
    "past_key": {0: "B", 2: "P"},
    "past_value": {0: "B", 2: "P"},
    "cache_lengths": {0: "B"},
    "block_table": {0: "B", 1: "max_blocks"},
    "attn_mask": {0: "B_mask", 2: "S_mask", 3: "L"},
}


def _outside(kind: ir.DataType) -> ir.DataType:
    """NumPy and ORT's Python interface have no bfloat16 and float8."""
    return FLOAT if kind in (ir.DataType.BFLOAT16, ir.DataType.FLOAT8E4M3FN) else kind


def call_model(
    config: MlaConfig,
    inputs: Arrays,
    opset: int = 20,
    dtype: str = "float32",
    *,
    seq_len: int | None = None,
    dynamic: bool = True,
    constant_weight: bool = False,
) -> onnx.ModelProto:
    """``dynamic``: batch, tokens and cache are symbols, else the numbers of ``inputs``."""
    nodes: list[ir.Node] = []

    def cast(value: ir.Value, to: ir.DataType, name: str) -> ir.Value:
        node = ir.node("Cast", [value], {"to": int(to)}, num_outputs=1)
        node.outputs[0].name = name
        nodes.append(node)
        return node.outputs[0]

    outside, operands, initializers = [], {}, []
    for name, array in inputs.items():
        kind = ir.DataType.from_numpy(array.dtype)
        if name == "kv_b_weight" and constant_weight:
            operands[name] = ir.Value(name=name, const_value=ir.tensor(array, kind, name=name))
            operands[name].type, operands[name].shape = ir.TensorType(kind), ir.Shape(array.shape)
            initializers.append(operands[name])
            continue
        shape: list[int | str] = list(array.shape)
        if dynamic:
            for axis, symbol in _AXES.get(name, {}).items():
                if array.ndim > 2 or name not in ("cos", "sin", "past_latent_scale"):  # tables, scales of channels
                    shape[axis] = symbol
        value = ir.Value(name=name, type=ir.TensorType(_outside(kind)), shape=ir.Shape(shape))
        outside.append(value)
        operands[name] = value if _outside(kind) == kind else cast(value, kind, f"{name}_cast")
        operands[name].shape, operands[name].type = ir.Shape(shape), ir.TensorType(kind)
    call = make_node(config, operands, TYPES[dtype], seq_len=seq_len, name="mla")
    nodes.append(call)
    results = []
    for name, value in zip(config.output_names(), [y for y in call.outputs if y.name != ""], strict=True):
        assert value.dtype is not None
        shown = _outside(value.dtype)
        value.name = name if shown == value.dtype else f"{name}_call"
        result = value if shown == value.dtype else cast(value, shown, name)
        result.type, result.shape = ir.TensorType(shown), value.shape
        results.append(result)
    graph = ir.Graph(
        outside, results, nodes=nodes, initializers=initializers, opset_imports={"": opset}, name="one_call"
    )
    model = ir.Model(graph, ir_version=9)
    attach(model, build_function(config, opset, TYPES[dtype], seq_len=seq_len))
    return ir.to_proto(model)


def session(model: onnx.ModelProto, level: int | None = None) -> ort.InferenceSession:
    """``level``: of graph optimisation, 0 for none."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    if level is not None:
        options.graph_optimization_level = ort.GraphOptimizationLevel(level)
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def feeds(inputs: Arrays) -> Arrays:
    return {
        name: x.astype(np.float32) if _outside(ir.DataType.from_numpy(x.dtype)) == FLOAT else x
        for name, x in inputs.items()
    }


def run(running: ort.InferenceSession, config: MlaConfig, inputs: Arrays) -> Arrays:
    """Outputs by name."""
    wanted = {value.name for value in running.get_inputs()}
    given = {name: x for name, x in feeds(inputs).items() if name in wanted}
    return dict(zip(config.output_names(), running.run(list(config.output_names()), given), strict=True))
