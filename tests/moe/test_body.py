"""The portable function body against the float64 reference, on stock ONNX Runtime."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from deltafuse.custom_ops.moe.body import OPSETS, build_function
from deltafuse.custom_ops.moe.call import make_node, read_call
from deltafuse.custom_ops.moe.draw import CASES, DTYPES, draw_inputs
from deltafuse.custom_ops.moe.reference import reference, relative_error, tolerance
from deltafuse.custom_ops.moe.spec import LATER, MoeConfig

from .configs import CONFIGS, FULL
from .onnx_call import Arrays, call_model, run, session


def check(config: MoeConfig, inputs: Arrays, results: Arrays, dtype: str) -> None:
    truth = reference(config, inputs)
    assert results["y"].shape == inputs["x"].shape
    error = relative_error(results["y"], truth["y"])
    assert error <= tolerance("body", dtype), error
    if config.has_ids:
        assert np.array_equal(results["expert_ids"], truth["expert_ids"])
        assert results["expert_weights"].dtype == np.float32
        assert relative_error(results["expert_weights"], truth["expert_weights"]) < 1e-6


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CONFIGS)
def test_it_agrees_with_the_reference(name: str, dtype: str) -> None:
    config, rng = CONFIGS[name], np.random.default_rng(1)
    inputs = draw_inputs(config, (2, 3), rng, dtype=dtype, scale_dtype="float16", router_dtype=dtype)
    running = session(call_model(config, inputs, dtype=dtype))
    for lead in ((2, 3), (1, 1), (1, 9), (0, 4), (3, 0)):
        fresh = draw_inputs(config, lead, rng, dtype=dtype, router_dtype=dtype)
        tokens = {name: fresh[name] if name in ("x", "router_logits") else x for name, x in inputs.items()}
        check(config, tokens, run(running, config, tokens), dtype)


@pytest.mark.parametrize("case", CASES)
def test_hostile_inputs(case: str) -> None:
    for name in ("full", "max-group", "few-in-groups", "not-gated", "int4-128"):
        config = CONFIGS[name]
        inputs = draw_inputs(config, 6, np.random.default_rng(2), case)
        check(config, inputs, run(session(call_model(config, inputs)), config, inputs), "float32")


@pytest.mark.parametrize("logit", [np.nan, np.inf, -np.inf, -104.0, -88.5, 3e38])
@pytest.mark.parametrize("function", ["sigmoid", "softmax"])
def test_hostile_logits(logit: float, function: str) -> None:
    config = MoeConfig(6, 2, 4, 2, score_function=function, has_router_weight=False, has_ids=True, n_group=2)
    inputs = draw_inputs(config, 3, np.random.default_rng(3))
    inputs["router_logits"][0, 3] = logit
    inputs["router_logits"][1, :] = logit
    check(config, inputs, run(session(call_model(config, inputs)), config, inputs), "float32")


@pytest.mark.parametrize("opset", OPSETS)
def test_every_opset(opset: int) -> None:
    for name in ("full", "float8", "not-gated"):
        config = CONFIGS[name]
        inputs = draw_inputs(config, 4, np.random.default_rng(4))
        model = call_model(config, inputs, opset)
        onnx.checker.check_model(model, full_check=True)
        try:
            running = session(model)
        except Exception as error:
            if "opset" in str(error) and opset > 26:
                pytest.skip(f"this onnxruntime does not load opset {opset}")
            raise
        check(config, inputs, run(running, config, inputs), "float32")


def test_one_expert_at_a_time_is_in_memory() -> None:
    """No value outside the loop is as large as the experts' weights, and the loop takes one expert's."""
    config = CONFIGS["int4-128"]
    function = build_function(config, 20)
    stacks = {name for name in function.graph.inputs if name.name in ("gate_up_weight", "down_weight", "gate_up_scale")}
    readers = [use.node for value in stacks for use in value.uses()]
    assert {node.op_type for node in readers} == {"Gather"}
    assert all(node.graph is not function.graph for node in readers)


def test_a_node_of_the_first_version_is_read_as_it_was() -> None:
    """Attributes and operands that came later are in a node only if they say something."""
    inputs = {name: ir.Value(name=name) for name in FULL.input_names()}
    node = make_node(FULL, inputs)
    assert not set(LATER) & set(node.attributes) and len(node.inputs) <= 18
    assert read_call(node) == (FULL, ir.DataType.FLOAT)
    for name in ("zero-experts-shared", "clamped-norm", "biases", "biases-int4", "biases-not-gated"):
        config = CONFIGS[name]
        node = make_node(config, {name: ir.Value(name=name) for name in config.input_names()})
        assert read_call(node) == (config, ir.DataType.FLOAT)
    del node.attributes["top_k"]
    with pytest.raises(ValueError, match="no attribute top_k"):
        read_call(node)


def test_names_in_a_node_must_be_those_of_the_configuration() -> None:
    with pytest.raises(ValueError, match="expected"):
        make_node(FULL, {"x": ir.Value(name="x")})


def test_what_the_body_is_not_built_for() -> None:
    with pytest.raises(ValueError, match="opset 17"):
        build_function(FULL, 17)
    with pytest.raises(ValueError, match="dtype"):
        build_function(FULL, 20, ir.DataType.DOUBLE)
    with pytest.raises(ValueError, match="top_k 9"):
        build_function(MoeConfig(8, 9, 4, 4), 20)
