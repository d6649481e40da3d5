"""Quantizing a model's experts and dense layers: what is stored, what it computes, what is left alone."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from deltafuse.custom_ops.common.parts_tensor import PartsTensor
from deltafuse.custom_ops.common.quantize_matrix import Statistics
from deltafuse.custom_ops.moe.call import read_call
from deltafuse.custom_ops.moe.spec import MoeConfig
from deltafuse.fusions.passes import PassManager
from deltafuse.fusions.quantize import Activations, Quantize, RaiseOpset, Seen, Sources, parse_quantize
from deltafuse.fusions.quantize.dense import MIN_ELEMENTS

from .models import CONFIG, TYPES, Array, layer_model, run

#: One expert a token, chosen by the bias alone: small errors before the router do not send tokens elsewhere.
STEADY = replace(CONFIG, num_experts=2, top_k=1, n_group=1, topk_group=1, norm_topk_prob=1)
#: Weights' relative error, and a bound for two layers' results.
BOUNDS = {
    "int4:128": (0.13, 0.5),
    "int8:128": (0.009, 0.05),
    "int8:channel": (0.009, 0.05),
    "uint8:channel": (0.009, 0.05),
}
BOUNDS |= {"int4:64:asym": (0.11, 0.5), "fp8:128x128": (0.03, 0.15), "bf16": (0.0025, 0.02)}  # fmt: skip


def tokens(dtype: str = "float32") -> Array:
    x: Array = np.random.default_rng(3).standard_normal((5, CONFIG.hidden_size)).astype(TYPES[dtype].numpy())
    return x


def quantized(model: ir.Model, text: str, statistics: dict[str, Statistics] | None = None) -> Quantize:
    schemes = parse_quantize(text)
    quantizer = Quantize(schemes, statistics)
    PassManager([RaiseOpset(schemes), quantizer])(model)
    onnx.checker.check_model(ir.to_proto(model), full_check=True)
    return quantizer


def calls(model: ir.Model) -> list[ir.Node]:
    return [node for node in model.graph if node.op_type == "GroupedQMoE"]


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("group", ["experts", "dense"])
@pytest.mark.parametrize("scheme", BOUNDS)
def test_every_scheme(scheme: str, group: str, dtype: str) -> None:
    model, x = layer_model(STEADY, dtype), tokens(dtype)
    before = run(model, x).astype(np.float64)
    result = quantized(model, f"{group}={scheme}").result
    weight_bound, bound = BOUNDS[scheme]
    assert len(result.tensors) == (8 if group == "experts" else 6)
    for tensor in result.tensors:
        assert (tensor.group, tensor.scheme, tensor.calibrated) == (group, scheme, False)
        assert 0 < tensor.error < weight_bound
        assert tensor.bytes_after <= tensor.bytes_before
    saved = sum(t.bytes_before - t.bytes_after for t in result.tensors)
    assert result.bytes_before - result.bytes_after == saved
    after = run(model, x)
    assert after.dtype == x.dtype
    assert np.linalg.norm(after - before) / np.linalg.norm(before) < bound
    types = {value.dtype for value in (*model.graph.inputs, *model.graph.outputs)}
    assert types == {TYPES[dtype]}


def test_both_groups_and_the_rest_of_the_model() -> None:
    model = layer_model()
    result = quantized(model, "experts=int4:128,dense=int8:128").result
    assert {t.group for t in result.tensors} == {"experts", "dense"} and len(result.tensors) == 14
    for node in calls(model):
        config, _ = read_call(node)
        assert (config.weight_format, config.shared_format, config.block_size) == ("int4", "int4", 128)
        assert model.functions[node.op_identifier()].opset_imports[""] == model.opset_imports[""] == 21
    assert len(model.functions) == 1
    # nothing of the old weights stays
    assert result.bytes_after < 0.2 * result.bytes_before
    assert not any(re.fullmatch(r"layer\d\.(gate_up_weight|in|gemm|out)", name) for name in model.graph.initializers)


def test_weights_that_quantize_exactly_compute_the_same() -> None:
    """Integer weights times a power of two: round to nearest finds them, so the products are the same to the bit."""
    model = layer_model(STEADY, layers=1)
    rng = np.random.default_rng(5)
    for name in ("in", "gemm", "out"):
        array = rng.integers(-7, 8, (256, 256)).astype(np.float32)
        array[::128] = array[:, ::128] = 7  # in every block, whichever way it lies
        model.graph.initializers[f"layer0.{name}"].const_value = ir.tensor(array / 64, name=f"layer0.{name}")
    before = run(model, tokens())
    result = quantized(model, "dense=int4:128").result
    assert [tensor.error for tensor in result.tensors] == [0.0] * 3
    after = run(model, tokens())
    assert np.linalg.norm(after - before) < 1e-5 * np.linalg.norm(before)


def test_blocks_wider_than_the_rows_are_whole_rows() -> None:
    model = layer_model()
    quantized(model, "experts=int8:512,dense=int8:512")
    assert read_call(calls(model)[0])[0].block_size == 0
    dequantize = next(node for node in model.graph if node.op_type == "DequantizeLinear")
    assert dequantize.attributes["block_size"].value == 256
    run(model, tokens())


def test_statistics_with_other_channels_are_not_used() -> None:
    """A value of that name in another model: without shapes in the graph only the weights can tell."""
    model = layer_model()
    inputs = {value.name for node in model.graph for value in node.inputs if value is not None}
    statistics = {name: Statistics(np.ones(3)) for name in inputs if name}
    result = quantized(model, "experts=int4:32,dense=int4:32", statistics).result
    assert result.tensors and not any(tensor.calibrated for tensor in result.tensors)
    assert any("the calibration has nothing of" in note for note in result.notes)


def test_what_is_quantized_already_is_left_alone() -> None:
    model = layer_model()
    quantized(model, "experts=int4:128")
    again = quantized(model, "experts=int8:128")
    assert again.result.tensors == []
    assert any("quantized already (int4)" in note for note in again.result.notes)
    assert "experts: nothing was quantized" in again.result.notes


def test_a_format_that_does_not_fit_is_refused_with_a_reason() -> None:
    model = layer_model(replace(CONFIG, intermediate_size=25))
    result = quantized(model, "experts=int4:128").result
    assert result.tensors == [] and "rows of 25: int4 needs an even number" in result.notes[0]


def test_a_weight_that_others_read_stays() -> None:
    model = layer_model(layers=1)
    graph = model.graph
    weight = graph.initializers["layer0.in"]
    index = ir.Value(name="i", const_value=ir.tensor(np.array([0]), name="i"))
    index.type, index.shape = ir.TensorType(ir.DataType.INT64), ir.Shape([1])
    graph.register_initializer(index)
    node = ir.node("Gather", [weight, index], num_outputs=1)
    node.outputs[0].name = "row"
    node.outputs[0].type, node.outputs[0].shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape([1, 256])
    graph.append(node)
    graph.outputs.append(node.outputs[0])
    result = quantized(model, "dense=int8:channel").result
    assert [t.name for t in result.tensors] == ["layer0.gemm", "layer0.out"]
    assert "layer0.in: other nodes than products read it too" in result.notes


def test_small_weights_stay() -> None:
    small = MoeConfig(4, 1, 64, 32)
    assert small.hidden_size**2 < MIN_ELEMENTS
    assert quantized(layer_model(small), "dense=int8:channel").result.tensors == []


def test_experts_with_biases_and_zero_experts() -> None:
    """What is beside the weights stays, and what down projections see has the biases in it."""
    config = replace(
        CONFIG, zero_experts=2, has_gate_up_bias=True, has_down_bias=True, has_shared_gate_up_bias=True, up_offset=1.0
    )
    x = np.random.default_rng(3).standard_normal((400, CONFIG.hidden_size)).astype(np.float32)
    model, before = layer_model(config, layers=1), run(layer_model(config, layers=1), x)
    first, given = model.graph.initializers["layer0.in"].const_value, calls(model)[0].inputs[0]
    assert first is not None and given is not None
    projected = (x @ first.numpy()).astype(np.float32)
    seen = Activations({given.name or "": Seen(np.mean(projected**2, axis=0), projected)}, "gptq")
    errors = {}
    for name, statistics in (("nearest", {}), ("gptq", seen)):
        model = layer_model(config, layers=1)
        result = quantized(model, "experts=int4:128", statistics).result  # type: ignore[arg-type]
        assert len(result.tensors) == 4
        assert all(t.calibrated == (name == "gptq") for t in result.tensors), result.tensors
        after, _ = read_call(calls(model)[0])
        assert (after.zero_experts, after.has_down_bias, after.weight_format) == (2, True, "int4")
        errors[name] = np.linalg.norm(run(model, x) - before) / np.linalg.norm(before)
    assert errors["gptq"] < 0.9 * errors["nearest"] < 0.2, errors


def test_statistics_choose_scales() -> None:
    model, x = layer_model(layers=1), tokens()
    x[:, :8] *= 50.0
    weight = model.graph.initializers["layer0.in"].const_value
    assert weight is not None
    matrix = weight.numpy().astype(np.float64)
    errors = {}
    for name, statistics in (("plain", {}), ("aware", {"x": Statistics.of_channels(np.mean(x**2, axis=0))})):
        model = layer_model(layers=1)
        result = quantized(model, "dense=int4:128", statistics).result  # type: ignore[arg-type]
        first = next(t for t in result.tensors if t.name == "layer0.in")
        assert first.calibrated == (name == "aware")
        held, scale = (model.graph.initializers[f"layer0.in.{part}"].const_value for part in ("int4", "scale"))
        assert held is not None and scale is not None
        value = held.numpy().astype(np.float64) * np.repeat(scale.numpy().astype(np.float64), 128, axis=0)
        errors[name] = np.linalg.norm(x @ (value - matrix))
        unseen = [note for note in result.notes if "nothing of its product's input" in note]
        assert len(unseen) == (2 if name == "aware" else 0)
    assert errors["aware"] < 0.97 * errors["plain"]


def test_experts_are_read_one_by_one() -> None:
    """A stack that can only be made part by part is never asked for as a whole."""
    asked: list[int] = []

    def parts(array: Array) -> ir.TensorProtocol:
        if array.ndim < 3:
            return ir.tensor(array)

        class Stack(PartsTensor):
            def numpy(self) -> Any:
                raise AssertionError("the whole stack was asked for")

        def make(index: int) -> Array:
            asked.append(index)
            return np.asarray(array[index])

        return Stack(make, ir.DataType.from_numpy(array.dtype), array.shape)

    model = layer_model(layers=1, tensors=parts)
    quantized(model, "experts=int4:128")
    assert sorted(asked) == sorted([*range(CONFIG.num_experts)] * 2)


BAD = {
    "int4:128": "expected GROUP=SCHEME",
    "expert=int4:128": "'expert': expected one of experts, dense",
    "experts=int4:128,experts=int8:128": "experts is given twice",
    "experts=int5:128": "format 'int5'",
    "dense=": "format ''",
    "experts=int4:7": "blocks of an even number of columns",
}


@pytest.mark.parametrize("text", BAD)
def test_what_asks_for_nothing_known(text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(BAD[text])):
        parse_quantize(text)


def test_spellings() -> None:
    assert parse_quantize(None) == parse_quantize("") == parse_quantize("none") == {}
    assert parse_quantize("dense=int4:7")["dense"].block_size == 7
    assert parse_quantize(" Experts = int4:128 , dense=none") == parse_quantize({"experts": "int4:128"})
    with pytest.raises(ValueError, match="expected text such as"):
        parse_quantize(3)  # type: ignore[arg-type]


def test_files_of_weights_do_not_stay_mapped(tmp_path: Path) -> None:
    """What was read of a map counts as memory: stacks that are put together from a file's tensors leave none mapped."""
    ir.save(layer_model(layers=1), tmp_path / "model.onnx", external_data="model.data", size_threshold_bytes=0)
    model = ir.load(tmp_path / "model.onnx")
    sources = Sources(model)
    external = [value.const_value for value in model.graph.initializers.values()]
    for name in ("gate_up_weight", "down_weight"):
        value = model.graph.initializers[f"layer0.{name}"]
        whole = value.const_value
        assert isinstance(whole, ir.ExternalTensor)
        value.const_value = PartsTensor(
            lambda i, whole=whole: whole.numpy()[i], whole.dtype, whole.shape.numpy(), name=value.name
        )
    quantizer = Quantize(parse_quantize("experts=int4:128"), sources=sources)
    quantizer.call(model)
    assert len(quantizer.result.tensors) == 4
    mapped = [t.name for t in external if isinstance(t, ir.ExternalTensor) and t.raw is not None]
    assert not [name for name in mapped if "weight" in str(name) and "shared" not in str(name)]
