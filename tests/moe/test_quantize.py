"""Quantizing matrices and stacks of experts: formats, error bounds, packing, calibration, streaming."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest
from deltafuse.custom_ops.common.parts_tensor import PartsTensor, SpillFile
from deltafuse.custom_ops.common.quantize_matrix import LIMITS, Quantized, Statistics, quantize_matrix, spread
from deltafuse.custom_ops.common.scheme import Scheme, parse_scheme
from deltafuse.custom_ops.moe.draw import draw_inputs
from deltafuse.custom_ops.moe.packing import unpack
from deltafuse.custom_ops.moe.quantize import ExpertStatistics, effective_blocks, quantize_stack
from deltafuse.custom_ops.moe.reference import dequantize, hidden, reference, relative_error
from deltafuse.custom_ops.moe.spec import MoeConfig
from numpy.typing import NDArray

Array = NDArray[Any]
TEXTS = ("int4:32", "int4:32:asym", "uint4:48", "int8:32", "int8:channel", "uint8:channel", "fp8:32x32", "fp8:channel")
#: Largest relative L2 error of normally distributed weights.
BOUNDS = {"int4": 0.125, "uint4": 0.11, "int8": 0.009, "uint8": 0.009, "float8": 0.03, "bfloat16": 0.0025}


def weights(rows: int = 96, cols: int = 160) -> Array:
    return 0.02 * np.random.default_rng(0).standard_normal((rows, cols)).astype(np.float32)


def value_of(matrix: Array, scheme: Scheme, **options: Any) -> tuple[Array, float]:
    """The numbers that the quantized matrix stands for, and the error that was reported."""
    found = quantize_matrix(matrix, scheme, **options)
    return value_of_quantized(found, scheme), found.error


def value_of_quantized(found: Quantized, scheme: Scheme) -> Array:
    if found.scale is None:
        return found.stored.astype(np.float64)
    return dequantize(found.stored, found.scale, found.zero_point, scheme.block_size, scheme.block_rows)


@pytest.mark.parametrize("text", [*TEXTS, "bf16"])
@pytest.mark.parametrize("scale_dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_errors_are_bounded_and_told(text: str, scale_dtype: Any) -> None:
    matrix, scheme = weights(), parse_scheme(text)
    value, error = value_of(matrix, scheme, scale_dtype=scale_dtype)
    found = np.linalg.norm(value - matrix)
    assert found / np.linalg.norm(matrix) < BOUNDS[scheme.kind]
    assert np.isclose(np.sqrt(error), found, rtol=1e-3)


@pytest.mark.parametrize("text", TEXTS)
def test_no_number_is_off_by_more_than_half_a_step(text: str) -> None:
    """Round to nearest: and nothing is clipped, so the bound holds for every weight."""
    matrix, scheme = weights(), parse_scheme(text)
    found = quantize_matrix(matrix, scheme)
    assert found.scale is not None
    step = spread(found.scale, matrix.shape, scheme.block_size, scheme.block_rows)
    value, _ = value_of(matrix, scheme)
    if scheme.kind == "float8":
        step = np.maximum(np.abs(matrix) / 8, step * 2.0**-9)  # three bits behind the point; the least spacing
    zero_point_step = 1.0 if scheme.asymmetric else 0.5  # the zero point is rounded as well
    assert np.all(np.abs(value - matrix) <= step * zero_point_step * 1.001)


@pytest.mark.parametrize("text", TEXTS)
def test_hostile_matrices(text: str) -> None:
    scheme = parse_scheme(text)
    zero = np.zeros((8, 64), np.float32)
    value, error = value_of(zero, scheme)
    assert not np.any(value) and error == 0
    one = zero.copy()
    one[3, 5] = -1e-3
    value, _ = value_of(one, scheme)
    assert np.isclose(value[3, 5], -1e-3, rtol=0.08) and np.count_nonzero(value) == 1
    constant = np.full((8, 64), 0.5, np.float32)
    assert np.allclose(value_of(constant, scheme)[0], 0.5, rtol=1e-3)
    with pytest.raises(ValueError, match="not all finite"):
        quantize_matrix(np.full((8, 64), np.nan, np.float32), scheme)
    huge = 1e30 * weights(8, 64)
    assert np.all(np.isfinite(value_of(huge, scheme)[0]))


@pytest.mark.parametrize("text", ["int4:32", "int4:32:asym", "int8:channel"])
def test_calibration_lowers_the_error_of_the_product(text: str) -> None:
    rng = np.random.default_rng(1)
    matrix, scheme = weights(), parse_scheme(text)
    mixing = rng.standard_normal((160, 160)) / 12 + np.diag(np.exp(rng.standard_normal(160)))
    x, fresh = (rng.standard_normal((600, 160)) @ mixing for _ in range(2))
    plain, aware = (
        value_of(matrix, scheme, statistics=statistics)[0] for statistics in (None, Statistics.of(x.astype(np.float32)))
    )
    before, after = (np.linalg.norm(fresh @ (value - matrix).T) for value in (plain, aware))
    assert after < 0.9 * before


def test_mean_squares_alone_help_too() -> None:
    rng = np.random.default_rng(8)
    matrix, scheme = weights(), parse_scheme("int4:32")
    size = np.exp(2 * rng.standard_normal(160))
    plain, aware = (
        value_of(matrix, scheme, statistics=s)[0] for s in (None, Statistics.of_channels((size**2).astype(np.float32)))
    )
    x = rng.standard_normal((400, 160)) * size
    before, after = (np.linalg.norm(x @ (value - matrix).T) for value in (plain, aware))
    assert after < 0.95 * before


@pytest.mark.parametrize("text", ["int4:32", "int8:channel", "fp8:128x128", "bf16"])
def test_the_error_of_the_product_is_what_it_is(text: str) -> None:
    """Measured on rows, and of channels that have nothing to do with each other on their mean squares."""
    rng = np.random.default_rng(4)
    matrix, scheme = weights(), parse_scheme(text)
    rows = rng.standard_normal((400, 160)).astype(np.float32) * rng.uniform(0.1, 3, 160).astype(np.float32)
    for algorithm in ("nearest", "aware", "gptq"):
        by_rows, by_channels = Statistics.of(rows, algorithm), Statistics.of_channels(np.mean(rows**2, 0), algorithm)
        assert by_rows is not None and by_channels is not None
        for seen in (by_rows, by_channels):
            found = quantize_matrix(matrix, scheme, np.float32, seen)
            off = matrix - value_of_quantized(found, scheme)
            if seen is by_rows:
                wanted = [np.sum((rows.astype(np.float64) @ m.T) ** 2) for m in (off, matrix)]
            else:
                wanted = [np.sum(m.astype(np.float64) ** 2 * np.mean(rows**2, 0)) for m in (off, matrix)]
            np.testing.assert_allclose([found.product_error, found.product_norm], wanted, rtol=1e-3)


def test_statistics_of_what_cannot_be_used() -> None:
    assert Statistics.of(np.zeros((4, 8), np.float32)) is None
    assert Statistics.of(np.full((4, 8), np.nan, np.float32)) is None
    assert Statistics.of(np.zeros((0, 8), np.float32)) is None
    rows = np.ones((3, 8), np.float32)
    rows[1] = np.inf
    found = Statistics.of(rows)
    assert found is not None and found.gram is not None and np.all(found.gram == 2.0)
    assert Statistics.of_channels(np.zeros(8)) is None
    assert Statistics.of_channels(np.full(8, np.nan)) is None
    # one direction only: the Gram matrix has rank one
    value, _ = value_of(weights(8, 8), parse_scheme("int4:8"), statistics=found)
    assert np.all(np.isfinite(value))


BAD_SCHEMES = {
    "int3:128": "format 'int3' is none of int4",
    "int4": "expected a block, such as int4:128",
    "fp8": "expected a block, such as fp8:128x128",
    "int4:0": "block '0'",
    "int4:-8": "block '-8'",
    "int4:1x2x3": "block '1x2x3'",
    "int4:8x8": "only fp8 has blocks of rows",
    "fp8:128:asym": "fp8 has no zero points",
    "bf16:128": "bf16 has no blocks",
    "int4:128:both": "expected FORMAT:BLOCK",
    "uint4:128:sym": "int4 is the symmetric one",
    "": "format ''",
}


@pytest.mark.parametrize("text", BAD_SCHEMES)
def test_what_names_no_scheme(text: str) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        parse_scheme(text)
    assert BAD_SCHEMES[text] in str(caught.value)


def test_schemes() -> None:
    assert parse_scheme("INT4:128") == Scheme("int4", 128, 1, False, "int4:128")
    assert parse_scheme("int4:64:asym") == Scheme("uint4", 64, 1, True, "int4:64:asym")
    assert parse_scheme("uint8:channel") == Scheme("uint8", 0, 1, True, "uint8:channel")
    assert parse_scheme("fp8:128x64") == Scheme("float8", 64, 128, False, "fp8:128x64")
    assert parse_scheme("bf16") == Scheme("bfloat16", 0, 1, False, "bf16")


# Stacks of experts.

CONFIG = MoeConfig(6, 2, 64, 48, 32, has_expert_bias=True, has_ids=True)
MOE_TEXTS = ("int4:32", "int4:32:asym", "int8:channel", "uint8:40", "fp8:16x32", "bf16")


def quantized_call(inputs: dict[str, Array], text: str, statistics: bool = False) -> tuple[MoeConfig, dict[str, Array]]:
    """The same call with all weights quantized."""
    scheme = parse_scheme(text)
    size, rows = effective_blocks(scheme, CONFIG, shared=False)
    shared_size, _ = effective_blocks(scheme, CONFIG, shared=True)
    config = replace(
        CONFIG,
        weight_format=scheme.kind,
        shared_format=scheme.kind,
        block_size=size,
        shared_block_size=shared_size,
        block_rows=rows,
        shared_block_rows=rows,
        has_zero_point=scheme.asymmetric,
        shared_has_zero_point=scheme.asymmetric,
    )
    assert config.check() is None
    seen = ExpertStatistics(CONFIG, inputs["x"], inputs, lambda i: inputs["gate_up_weight"][i])
    result = {name: x for name, x in inputs.items() if not name.endswith("_weight") or name == "router_weight"}
    for name in ("gate_up", "down", "shared_gate_up", "shared_down"):
        use = getattr(seen, name) if statistics and name in ("gate_up", "down") else None
        stack = quantize_stack(ir.tensor(inputs[f"{name}_weight"]), scheme, ir.DataType.FLOAT, SpillFile(), use)
        assert stack is not None
        before = inputs[f"{name}_weight"].astype(np.float64)
        for part, tensor in (("weight", stack.weight), ("scale", stack.scale), ("zero_point", stack.zero_point)):
            if tensor is not None:
                result[f"{name}_{part}"] = tensor.numpy()
        stored = result[f"{name}_weight"]
        numbers = stored if scheme.kind == "bfloat16" else unpack(stored, scheme.kind)
        scale, zero = result.get(f"{name}_scale"), result.get(f"{name}_zero_point")
        value = dequantize(numbers, scale, zero, size if "shared" not in name else shared_size, rows)
        assert np.isclose(stack.error, relative_error(value, before), rtol=1e-3)
    assert set(result) == set(config.input_names())
    return config, result


def test_what_down_projections_see() -> None:
    """Their own experts' hidden channels, biases and all; every expert's where the router is not known."""
    config = replace(CONFIG, has_gate_up_bias=True, activation_alpha=1.702, up_offset=1.0)
    inputs = draw_inputs(config, 40, np.random.default_rng(6))
    x, bias = inputs["x"].astype(np.float64), inputs["gate_up_bias"]
    ids = reference(replace(config, has_ids=True), inputs)["expert_ids"]
    for router in (inputs, None):
        seen = ExpertStatistics(config, inputs["x"], router, lambda i: inputs["gate_up_weight"][i], bias)
        for index in range(config.num_experts):
            rows = x if router is None else x[np.any(ids == index, axis=1)]
            found = seen.down(index)
            if not len(rows):
                assert found is None
                continue
            mixed = rows @ inputs["gate_up_weight"][index].astype(np.float64).T + bias[index]
            assert found is not None and found.gram is not None
            wide = hidden(config, mixed)
            assert relative_error(found.gram, wide.T @ wide) < 1e-5


@pytest.mark.parametrize("text", MOE_TEXTS)
def test_a_call_with_quantized_weights_is_near_the_original(text: str) -> None:
    inputs = draw_inputs(CONFIG, 9, np.random.default_rng(2))
    truth = reference(CONFIG, inputs)
    config, stored = quantized_call(inputs, text)
    result = reference(config, stored)
    assert np.array_equal(result["expert_ids"], truth["expert_ids"])
    assert relative_error(result["y"], truth["y"]) < 2 * BOUNDS[config.weight_format]


def test_calibrated_experts_are_nearer() -> None:
    rng = np.random.default_rng(3)
    inputs = draw_inputs(CONFIG, 600, rng)
    inputs["x"] = (inputs["x"] @ (rng.standard_normal((64, 64)) / 8 + np.diag(np.exp(rng.standard_normal(64))))).astype(
        np.float32
    )
    truth = reference(CONFIG, inputs)["y"]
    plain, aware = (
        relative_error(reference(*quantized_call(inputs, "int4:32", statistics))["y"], truth)
        for statistics in (False, True)
    )
    assert aware < 0.93 * plain


def test_a_stack_is_read_and_written_expert_by_expert() -> None:
    rng = np.random.default_rng(4)
    asked: list[int] = []

    def make(index: int) -> Array:
        asked.append(index)
        return rng.standard_normal((8, 64)).astype(np.float16)

    steps: list[int] = []
    stack = PartsTensor(make, ir.DataType.FLOAT16, (5, 8, 64), name="experts")
    found = quantize_stack(
        stack, parse_scheme("int4:32"), ir.DataType.FLOAT16, SpillFile(), progress=lambda done: steps.append(done)
    )
    assert asked == [0, 1, 2, 3, 4] and steps == [1, 2, 3, 4, 5] and found is not None
    assert isinstance(found.weight, PartsTensor) and found.weight.dtype == ir.DataType.UINT8
    file = io.BytesIO()
    found.weight.tofile(file)
    assert file.getvalue() == found.weight.tobytes() and len(file.getvalue()) == 5 * 8 * 32
    assert found.scale is not None and found.scale.dtype == ir.DataType.FLOAT16


def test_scales_too_small_for_float16_are_refused() -> None:
    tiny = ir.tensor(1e-5 * weights(8, 64))
    assert quantize_stack(tiny, parse_scheme("int8:32"), ir.DataType.FLOAT16, SpillFile()) is None
    assert quantize_stack(tiny, parse_scheme("int8:32"), ir.DataType.FLOAT, SpillFile()) is not None


def test_parts_that_are_not_what_was_said() -> None:
    stack = PartsTensor(lambda i: np.zeros((2, 2), np.float32), ir.DataType.FLOAT16, (1, 2, 2), name="w")
    with pytest.raises(ValueError, match="part 0 of 'w' is float32"):
        stack.numpy()


def test_limits_are_those_of_the_types() -> None:
    assert LIMITS == {"int4": (-8, 7), "uint4": (0, 15), "int8": (-128, 127), "uint8": (0, 255)}
