"""float8 weights of experts whose scales are multiplied in by hand: recognised, or left exactly as they are."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from deltafuse.fusions.cleanup import constants
from deltafuse.fusions.moe.scaled import ScaledWeights
from deltafuse.fusions.pipeline import fuse_model
from exports import library
from exports.moe_quantized import BY_HAND, scaled_by_hand
from onnx import numpy_helper

from . import kit

BLOCK = 8


@pytest.fixture(autouse=True)
def weights_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Constant expressions are folded where they are small, which weights of models are not."""
    monkeypatch.setattr(constants, "_FOLD_LIMIT", 60)


def made(name: str, style: str, opset: int = 21) -> onnx.ModelProto:
    """An export with its experts in float8. The ops that it has mean the same in opset 21."""
    model = onnx.ModelProto()
    model.CopyFrom(library.export(name).proto())
    model.opset_import[0].version = opset
    model = scaled_by_hand(style, BLOCK)(model)
    onnx.checker.check_model(model)
    return model


def outputs(name: str, model: onnx.ModelProto) -> list[library.Arrays]:
    export, session = library.export(name), library.session(model)
    return [library.run(session, library.feeds_for(model, binding, export.shapes)) for binding in export.bindings]


def kinds(model: onnx.ModelProto) -> list[str]:
    return sorted(node.op_type for node in model.graph.node)


@pytest.mark.parametrize("style", BY_HAND)
@pytest.mark.parametrize("name", ["moe_dense", "moe_where_rows"])
def test_they_are_fused_and_keep_their_numbers(name: str, style: str) -> None:
    before = made(name, style)
    report = fuse_model(ir.from_proto(before))
    assert report.count("moe") == 1, kit.why(report)
    config = report.regions[0].config
    assert (config["weight_format"], config["block_size"]) == ("float8", BLOCK)
    assert report.model is not None
    after = ir.to_proto(report.model)
    assert "DequantizeLinear" not in kinds(after) and len(after.graph.output) == len(before.graph.output)
    for first, second in zip(outputs(name, before), outputs(name, after), strict=True):
        assert library.worst(second, first)[0] < 1e-4
    # the very bytes
    stored = [t for t in before.graph.initializer if t.data_type == onnx.TensorProto.FLOAT8E4M3FN]
    held = [t for t in after.graph.initializer if t.data_type == onnx.TensorProto.UINT8]
    was, now = (
        np.sort(np.concatenate([numpy_helper.to_array(t).view(np.uint8).reshape(-1) for t in tensors]))
        for tensors in (stored, held)
    )
    assert np.array_equal(was, now)


@pytest.mark.parametrize("style", BY_HAND)
def test_what_is_not_fused_stays_as_it_is(style: str) -> None:
    """Experts by a table are refused; and an opset that has no blocks."""
    for name, opset in (("moe_half_scores", 21), ("moe_dense", 20)):
        if name == "moe_half_scores":
            before = made("moe_dense", style)
            for node in before.graph.node:  # a router that the op does not know
                if node.op_type == "Sigmoid" and "gate" not in node.name and node.output[0] == "sigmoid":
                    node.op_type = "Tanh"
        else:
            before = made(name, style, opset)
        report = fuse_model(ir.from_proto(before))
        assert report.count("moe") == 0 and report.model is not None
        after = ir.to_proto(report.model)
        assert "DequantizeLinear" not in kinds(after)
        assert kinds(after).count("Mul") == kinds(before).count("Mul")
        for first, second in zip(outputs("moe_dense", before), outputs("moe_dense", after), strict=True):
            assert all(np.array_equal(first[key], second[key]) for key in first)


def test_scales_that_change_within_blocks_are_left_alone() -> None:
    before = made("moe_dense", "baked")
    for tensor in before.graph.initializer:
        if tensor.name.endswith("_scale"):
            array = numpy_helper.to_array(tensor).copy()
            array[..., 3] *= 2
            tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
    weights = ScaledWeights(ir.from_proto(before))
    assert weights.rewrite() == 0
    assert fuse_model(ir.from_proto(before)).count("moe") == 0
