"""Latent attention whose key and value weights are quantized, or whose layer has what the op has not."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import pytest
from exports import library
from onnx import helper, numpy_helper

from . import kit


def quantized(model: onnx.ModelProto, weights: list[str], block: int = 0) -> onnx.ModelProto:
    """These weights in int8, dequantized in front of their layers: a scale a column, or one for each block of rows."""
    made = onnx.ModelProto.FromString(model.SerializeToString())
    graph = made.graph
    for name in weights:
        old = next(t for t in graph.initializer if t.name == name)
        array = numpy_helper.to_array(old).astype(np.float32)
        groups = array.reshape(-1, block or array.shape[0], array.shape[1])
        scale = np.abs(groups).max(axis=1) / 127.0
        codes = np.rint(groups / scale[:, None]).astype(np.int8).reshape(array.shape)
        wide = numpy_helper.to_array(old).dtype
        graph.initializer.remove(old)
        graph.initializer.append(numpy_helper.from_array(codes, f"{name}_codes"))
        stored = scale if block else scale[0]
        graph.initializer.append(numpy_helper.from_array(stored.astype(wide), f"{name}_scale"))
        axis = {"axis": 0, "block_size": block} if block else {"axis": 1}
        graph.node.insert(
            0, helper.make_node("DequantizeLinear", [f"{name}_codes", f"{name}_scale"], [name], f"{name}_plain", **axis)
        )
    onnx.checker.check_model(made)
    return made


def weights_behind(model: onnx.ModelProto) -> list[str]:
    """The weights of the layers that read the normed latent."""
    constants = {t.name for t in model.graph.initializer}
    norms = {"kv_norm.weight", "convert_element_type_default"}  # float16: widened when it was exported
    scaled = [o for n in model.graph.node if norms.intersection(n.input) for o in n.output]
    moved = [o for n in model.graph.node if n.op_type in ("Concat", "Cast") and scaled[0] in n.input for o in n.output]
    return [
        n.input[1]
        for n in model.graph.node
        if n.op_type == "MatMul" and n.input[0] in (*scaled, *moved) and n.input[1] in constants
    ]


@pytest.mark.parametrize(
    ("name", "block"),
    [("mla_half", 0), ("mla_two", 0), ("mla_latent_piece", 0), ("mla_both_op23", 8), ("mla_hub_f16", 0)],
)
def test_quantized_weights_stay_quantized(name: str, block: int) -> None:
    """The node reads what the graph dequantizes; no weight is stored as numbers."""
    export = library.export(name)
    plain = export.proto()
    before = quantized(plain, weights_behind(plain), block)
    report, after = kit.fuse(before)
    assert report.count("mla") == 1, kit.why(report)
    assert any("stays quantized" in n for n in report.regions[0].notes)
    producers = {output: n for n in after.graph.node for output in n.output}
    node = next(n for n in after.graph.node if n.op_type == "LatentAttention")
    seen: set[str] = set()
    names = [node.input[3]]
    while names:
        producer = producers.get(names.pop())
        if producer is not None:
            seen.add(producer.op_type)
            names += list(producer.input)
    assert "DequantizeLinear" in seen
    codes = [t.name for t in after.graph.initializer if t.data_type == onnx.TensorProto.INT8]
    assert len(codes) == len([t for t in before.graph.initializer if t.data_type == onnx.TensorProto.INT8])
    # optimised, ONNX Runtime's CPU rounds the activations of a quantized layer to 8 bits: not what the model says
    exact, fused = library.session(before, optimize=False), library.session(after)
    for feeds in map(export.feeds, export.bindings):
        error, output = library.worst(library.run(fused, feeds), library.run(exact, feeds))
        assert error <= export.tolerance, f"{output} is off by {error:.1e}"


def with_bias(model: onnx.ModelProto) -> None:
    layer = next(n for n in model.graph.node if n.name == "node_linear_2")
    width = next(t for t in model.graph.initializer if t.name == layer.input[1]).dims[1]
    bias = np.random.default_rng(0).standard_normal(width).astype(np.float32)
    model.graph.initializer.append(numpy_helper.from_array(bias, "kv_b_bias"))
    behind = helper.make_node("Add", ["unbiased", "kv_b_bias"], [layer.output[0]], "node_bias")
    layer.output[0] = "unbiased"
    model.graph.node.insert(list(model.graph.node).index(layer) + 1, behind)


def by_integers(model: onnx.ModelProto) -> None:
    """As ONNX Runtime's dynamic quantization leaves it: products of integers."""
    layer = next(n for n in model.graph.node if n.name == "node_linear_2")
    weight = next(t for t in model.graph.initializer if t.name == layer.input[1])
    codes = np.rint(numpy_helper.to_array(weight) * 16).astype(np.int8)
    model.graph.initializer.append(numpy_helper.from_array(codes, "kv_b_codes"))
    model.graph.initializer.append(numpy_helper.from_array(np.float32(1 / 16), "kv_b_scale"))
    x, y = layer.input[0], layer.output[0]
    made = [
        helper.make_node("DynamicQuantizeLinear", [x], ["x_codes", "x_scale", "x_zero"]),
        helper.make_node("MatMulInteger", ["x_codes", "kv_b_codes", "x_zero"], ["sums"]),
        helper.make_node("Cast", ["sums"], ["sums_float"], to=onnx.TensorProto.FLOAT),
        helper.make_node("Mul", ["x_scale", "kv_b_scale"], ["both_scales"]),
        helper.make_node("Mul", ["sums_float", "both_scales"], [y]),
    ]
    place = list(model.graph.node).index(layer)
    model.graph.node.remove(layer)
    for i, node in enumerate(made):
        model.graph.node.insert(place + i, node)


def by_blocks(model: onnx.ModelProto) -> None:
    """As ONNX Runtime's 4-bit quantizer leaves it: one MatMulNBits."""
    layer = next(n for n in model.graph.node if n.name == "node_linear_2")
    weight = numpy_helper.to_array(next(t for t in model.graph.initializer if t.name == layer.input[1]))
    rng = np.random.default_rng(0)
    columns = weight.shape[1]
    codes = rng.integers(0, 256, (columns, 1, 8), np.uint8)
    model.graph.initializer.append(numpy_helper.from_array(codes, "kv_b_codes"))
    scales = rng.uniform(0.02, 0.05, columns).astype(np.float32)
    model.graph.initializer.append(numpy_helper.from_array(scales, "kv_b_scales"))
    layer.op_type, layer.domain = "MatMulNBits", "com.microsoft"
    layer.input[1:] = ["kv_b_codes", "kv_b_scales"]
    layer.attribute.extend(
        helper.make_attribute(k, v)
        for k, v in {"K": weight.shape[0], "N": columns, "bits": 4, "block_size": 16}.items()
    )
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))


@pytest.mark.parametrize(
    ("edit", "code"),
    [(with_bias, "bias"), (by_integers, "quantized"), (by_blocks, "quantized")],
    ids=["bias", "integers", "blocks"],
)
def test_other_layers_are_refused_by_name(edit: Callable[[onnx.ModelProto], None], code: str) -> None:
    before = library.export("mla_half").proto()
    del before.graph.value_info[:]
    edit(before)
    onnx.checker.check_model(before)
    report, after = kit.fuse(before)
    refusals = [r.refusal for r in report.regions if r.op == "mla"]
    assert len(refusals) == 1 and refusals[0] is not None and refusals[0].code == code, kit.why(report)
    kit.same(before, after, library.export("mla_half").feeds(), tolerance=1e-6)
