"""The portable body in stock ONNX Runtime against the float64 reference."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from deltafuse.custom_ops.kda import body as body_module
from deltafuse.custom_ops.kda.body import build_function, overload_name
from deltafuse.custom_ops.kda.call import attach, make_node
from deltafuse.custom_ops.kda.draw import CASES, draw_inputs
from deltafuse.custom_ops.kda.reference import reference, relative_error, tolerance
from deltafuse.custom_ops.kda.spec import ATTRIBUTES, INPUTS, KdaConfig

from .configs import CONFIGS, FULL
from .onnx_call import TYPES, Arrays, call_model, run, session

LENGTHS = (1, 2, 15, 16, 17, 70)


def assert_close(got: Arrays, want: Arrays, allowed: float, what: object) -> None:
    errors = {name: relative_error(got[name], want[name]) for name in got}
    assert max(errors.values()) <= allowed, f"{what}: {errors}, allowed {allowed}"


@pytest.mark.parametrize("name", CONFIGS)
def test_every_case_and_length(name: str) -> None:
    config = CONFIGS[name]
    running = None
    for case in CASES:
        if case == "ragged" and not config.has_cu_seqlens:
            continue
        for tokens in LENGTHS:
            inputs = draw_inputs(config, 3, tokens, np.random.default_rng(tokens), case)
            running = running or session(call_model(config, inputs))
            got = run(running, config, inputs)
            assert_close(got, reference(config, inputs), tolerance("body", "float32", case), (case, tokens))


@pytest.mark.parametrize("hoist", [False, True])
@pytest.mark.parametrize("case", ["normal", "collinear-slow", "gate-unbounded"])
def test_both_chunk_arrangements(hoist: bool, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_module, "HOIST_UP_TO", 1 << 30 if hoist else 0)
    config = replace(CONFIGS["head-128"], num_v_heads=2)
    inputs = draw_inputs(config, 2, 300, np.random.default_rng(5), case)
    got = run(session(call_model(config, inputs)), config, inputs)
    assert_close(got, reference(config, inputs), tolerance("body", "float32", case), case)


@pytest.mark.parametrize("opset", [18, 20, 21, 23, 24, 27])
@pytest.mark.parametrize("dtype", TYPES)
def test_opsets_and_types(opset: int, dtype: str) -> None:
    for name, state_dtype in (("full", "float32"), ("ragged", dtype), ("wide-conv-state", dtype)):
        config = CONFIGS[name]
        inputs = draw_inputs(config, 3, 20, np.random.default_rng(1), dtype=dtype, state_dtype=state_dtype)
        model = call_model(config, inputs, opset, dtype, state_dtype)
        onnx.checker.check_model(model, full_check=True)
        got = run(session(model), config, inputs)
        assert_close(got, reference(config, inputs), tolerance("body", dtype), name)


@pytest.mark.parametrize("seq_len", [1, 40])
def test_known_length(seq_len: int) -> None:
    inputs = draw_inputs(FULL, 2, seq_len, np.random.default_rng(2))
    model = call_model(FULL, inputs, seq_len=seq_len)
    kinds = {node.op_type for node in model.functions[0].node}
    assert "If" not in kinds and ("Scan" in kinds) == (seq_len > 1)
    got = run(session(model), FULL, inputs)
    assert_close(got, reference(FULL, inputs), tolerance("body", "float32"), seq_len)


@pytest.mark.parametrize("tokens", [1, 5, 40])
def test_frozen_shapes_with_the_general_body(tokens: int) -> None:
    """Both branches stay well typed where the model knows T."""
    inputs = draw_inputs(FULL, 2, tokens, np.random.default_rng(8))
    model = call_model(FULL, inputs, dynamic=False)
    onnx.checker.check_model(model, full_check=True)
    got = run(session(model), FULL, inputs)
    assert_close(got, reference(FULL, inputs), tolerance("body", "float32"), tokens)


def test_no_tokens_at_all() -> None:
    config = replace(FULL, conv_width=0, conv_state_width=0, conv_activation="none", has_conv_bias=False)
    config = replace(config, has_conv_state=False, has_present_conv_state=False)
    inputs = draw_inputs(config, 2, 0, np.random.default_rng(3))
    got = run(session(call_model(config, inputs)), config, inputs)
    assert got["o"].shape == (2, 0, 20)
    np.testing.assert_array_equal(got["final_state"], inputs["initial_state"])


def test_a_reset_by_infinite_decay() -> None:
    config = KdaConfig(2, 2, 5, 4, 0.5, has_initial_state=True, has_final_state=True)
    inputs = draw_inputs(config, 1, 40, np.random.default_rng(4))
    inputs["g"][:, ::7] = -np.inf
    got = run(session(call_model(config, inputs)), config, inputs)
    assert_close(got, reference(config, inputs), tolerance("body", "float32"), "reset")


def test_overloads_live_side_by_side() -> None:
    """Two configurations, one of them called twice, and omitted optional inputs in between."""
    first, second = (
        KdaConfig(2, 2, 4, 4, 0.5),
        replace(KdaConfig(2, 2, 4, 4, 0.25), has_norm=True, has_final_state=True),
    )
    inputs = draw_inputs(second, 1, 5, np.random.default_rng(6))
    shapes = {name: ir.Shape(x.shape) for name, x in inputs.items()}
    values = {name: ir.Value(name=name, type=ir.TensorType(TYPES["float32"]), shape=shapes[name]) for name in inputs}
    nodes, outputs = [], []
    for number, config in enumerate((first, second, first)):
        node = make_node(config, {name: values[name] for name in config.input_names()}, name=f"kda_{number}")
        node.outputs[0].name = f"o_{number}"
        if config.has_final_state:
            assert node.outputs[1].name == ""
            node.outputs[2].name = "state"
        nodes.append(node)
        outputs.append(node.outputs[0])
    graph = ir.Graph(list(values.values()), outputs, nodes=nodes, opset_imports={"": 20}, name="two")
    model = ir.Model(graph, ir_version=9)
    for config in (first, second, first):
        attach(model, build_function(config, 20))
    assert len(model.functions) == 2 and model.ir_version == 10
    for ir_version in (9, 10):
        proto = ir.to_proto(model)
        proto.ir_version = ir_version
        got = session(proto).run(None, inputs)
        for result, config in zip(got, (first, second, first), strict=True):
            assert relative_error(result, reference(config, inputs)["o"]) < tolerance("body", "float32")
    onnx.checker.check_model(ir.to_proto(model), full_check=True)


def test_signature_is_the_spec() -> None:
    function = build_function(FULL, 20)
    assert [value.name for value in function.inputs] == list(INPUTS)
    assert set(ATTRIBUTES) | {"state_dtype"} == set(function.attributes)
    assert len({overload_name(FULL, t, s) for t in TYPES.values() for s in TYPES.values()}) == 9
    assert all(node.domain == "" for node in ir.traversal.RecursiveGraphIterator(function.graph))


def test_shapes_and_types_of_the_node() -> None:
    inputs = draw_inputs(FULL, 2, 3, np.random.default_rng(7))
    values = {name: ir.Value(name=name, shape=ir.Shape(x.shape)) for name, x in inputs.items()}
    node = make_node(FULL, values, ir.DataType.FLOAT16)
    assert [tuple(y.shape or ()) for y in node.outputs] == [(2, 3, 20), (2, 44, 3), (2, 4, 6, 5)]
    assert [y.dtype for y in node.outputs] == [ir.DataType.FLOAT16, ir.DataType.FLOAT16, ir.DataType.FLOAT]


def test_bad_calls_are_refused() -> None:
    with pytest.raises(ValueError, match="opset 17"):
        build_function(FULL, 17)
    with pytest.raises(ValueError, match="state_dtype"):
        build_function(FULL, 20, state_dtype=ir.DataType.DOUBLE)
    with pytest.raises(ValueError, match="not a multiple"):
        build_function(replace(FULL, num_v_heads=3), 20)
    with pytest.raises(ValueError, match="expected"):
        make_node(FULL, {})
