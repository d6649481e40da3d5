"""GroupedQMoE through the plugin EP on the CPU device, against the float64 reference."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import deltafuse
import numpy as np
import onnx
import onnxruntime as ort
import pytest
from deltafuse.custom_ops.moe.body_ort import MIN_ORT
from deltafuse.custom_ops.moe.draw import DTYPES, draw_inputs
from deltafuse.custom_ops.moe.reference import reference, relative_error, tolerance
from deltafuse.custom_ops.moe.spec import MoeConfig
from deltafuse.fallback import first_op
from deltafuse.session import _weights_outside_of_the_arena
from moe.configs import CONFIGS, FULL
from moe.onnx_call import Arrays, call_model, run
from onnx import numpy_helper

from .call import quiet

pytestmark = pytest.mark.usefixtures("library")


def plugin_session(model: onnx.ModelProto, *, strict: bool = True) -> ort.InferenceSession:
    made: ort.InferenceSession = deltafuse.session(
        model.SerializeToString(), device="cpu", sess_options=quiet(), strict=strict
    )
    return made


def check(config: MoeConfig, inputs: Arrays, got: Arrays, dtype: str) -> None:
    truth = reference(config, inputs)
    assert got["y"].shape == inputs["x"].shape
    assert relative_error(got["y"], truth["y"]) <= tolerance("cpu", dtype)
    if config.has_ids:
        assert np.array_equal(got["expert_ids"], truth["expert_ids"])
        assert relative_error(got["expert_weights"], truth["expert_weights"]) < 1e-6


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CONFIGS)
def test_against_reference(name: str, dtype: str) -> None:
    config, rng = CONFIGS[name], np.random.default_rng(1)
    how: dict[str, Any] = {"dtype": dtype, "scale_dtype": dtype, "router_dtype": dtype}
    inputs = draw_inputs(config, (2, 3), rng, **how)
    running = plugin_session(call_model(config, inputs, dtype=dtype))
    for lead in ((2, 3), (1, 1), (3, 40), (0, 4), (3, 0)):
        fresh = draw_inputs(config, lead, rng, **how)
        tokens = {name: fresh[name] if name in ("x", "router_logits") else x for name, x in inputs.items()}
        check(config, tokens, run(running, config, tokens), dtype)


def test_two_dimensional_tokens_of_a_known_number() -> None:
    inputs = draw_inputs(FULL, 5, np.random.default_rng(2))
    check(FULL, inputs, run(plugin_session(call_model(FULL, inputs, dynamic=False)), FULL, inputs), "float32")


@pytest.mark.parametrize("case", ["bias-nan", "bias-inf", "bias-all-nan", "zero-scales"])
def test_corrupted_operands(case: str) -> None:
    inputs = draw_inputs(FULL, 7, np.random.default_rng(3), case)
    check(FULL, inputs, run(plugin_session(call_model(FULL, inputs)), FULL, inputs), "float32")


def test_runs_of_threads_at_once_agree() -> None:
    from concurrent.futures import ThreadPoolExecutor

    config = CONFIGS["int4-128"]
    inputs = draw_inputs(config, 33, np.random.default_rng(4))
    running = plugin_session(call_model(config, inputs))
    first = run(running, config, inputs)["y"]
    with ThreadPoolExecutor(4) as pool:
        for other in pool.map(lambda _: run(running, config, inputs)["y"], range(12)):
            assert np.array_equal(first, other)


def refused(model: onnx.ModelProto) -> str:
    """Why the EP did not take the op's node."""
    running = plugin_session(model, strict=False)
    reasons = [node.reason for node in deltafuse.assignment(running).refused]
    assert len(reasons) == 1, reasons
    return str(reasons[0])


def with_attribute(config: MoeConfig, **changes: Any) -> onnx.ModelProto:
    """The call of ``config`` with other attributes than its operands are for."""
    model = call_model(config, draw_inputs(config, 2, np.random.default_rng(5)))
    node = next(n for n in model.graph.node if n.op_type == "GroupedQMoE")
    for name, value in changes.items():
        kept = [a for a in node.attribute if a.name != name]
        del node.attribute[:]
        node.attribute.extend([*kept, onnx.helper.make_attribute(name, value)])
    return model


REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "top-k": ({"top_k": 17}, "top_k 17 of num_experts 16"),
    "no-experts": ({"num_experts": 0}, "num_experts 0: expected 1 to 65536"),
    "other-experts": ({"num_experts": 32}, "router_weight has shape [16, 24]: expected [32, 24]"),
    "groups": ({"n_group": 3}, "num_experts 16, n_group 3"),
    "group-top": ({"group_top": 5}, "group_top 5 of 4 experts a group"),
    "score": ({"score_function": "tanh"}, "score_function 'tanh': expected one of sigmoid, softmax"),
    "activation": ({"activation": "mish"}, "activation 'mish': expected one of silu"),
    "format": ({"weight_format": "int3"}, "weight_format 'int3': expected one of float, int4"),
    "format-of-others": ({"weight_format": "int8"}, "gate_up_weight is uint8: expected int8"),
    "block": ({"block_size": 8}, "gate_up_scale has shape [16, 20, 2]: expected [16, 20, 3]"),
    "odd-block": ({"block_size": 5}, "4-bit weights need even numbers"),
    "rows": ({"block_rows": 2}, "only float8 weights share scales"),
    "clamp": ({"gate_limit": -1.0}, "gate_limit -1"),
    "scale": ({"routed_scaling_factor": float("inf")}, "not finite"),
    "zero-experts": ({"zero_experts": 16}, "zero_experts 16 of num_experts 16"),
    "weights-of-zero-experts": ({"zero_experts": 2}, "gate_up_weight has shape [16, 20, 12]: expected [14, 20, 12]"),
    "least-sum": ({"norm_min": -0.5}, "norm_min -0.5"),
    "slope": ({"activation": "gelu", "activation_alpha": 2.0}, "activation_alpha 2 with activation gelu"),
    "offset": ({"up_offset": float("nan")}, "up_offset is not finite"),
    "shared": ({"shared_intermediate_size": 0}, "without a shared_intermediate_size"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_is_not_taken(name: str) -> None:
    changes, reason = REFUSALS[name]
    assert reason in refused(with_attribute(FULL, **changes))


def test_a_scale_of_another_type_is_not_taken() -> None:
    config = replace(FULL, has_ids=False)
    model = call_model(config, draw_inputs(config, 2, np.random.default_rng(6)))
    scale = next(t for t in model.graph.initializer if t.name == "down_scale")
    scale.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(scale).astype(np.float16), "down_scale"))
    assert "down_scale is float16: expected float32 or float32" in refused(model)


def test_a_bias_of_another_shape_is_not_taken() -> None:
    config = CONFIGS["biases"]
    model = call_model(config, draw_inputs(config, 2, np.random.default_rng(6)))
    bias = next(t for t in model.graph.initializer if t.name == "gate_up_bias")
    bias.CopyFrom(numpy_helper.from_array(np.zeros((8, 19), np.float32), "gate_up_bias"))
    assert "gate_up_bias has shape [8, 19]: expected [8, 20]" in refused(model)


def test_a_call_that_does_not_fit_names_the_node() -> None:
    config = CONFIGS["logits"]
    inputs = draw_inputs(config, 4, np.random.default_rng(7))
    running = plugin_session(call_model(config, inputs))
    fewer = inputs | {"router_logits": inputs["router_logits"][:3]}
    with pytest.raises(Exception, match="router_logits has 3 tokens and x has 4") as caught:
        run(running, config, fewer)
    assert "'moe'" in str(caught.value)


def test_a_refused_call_runs_as_its_body_and_says_why() -> None:
    inputs = draw_inputs(FULL, 3, np.random.default_rng(8))
    model = call_model(FULL, inputs)
    node = next(n for n in model.graph.node if n.op_type == "GroupedQMoE")
    node.attribute.append(onnx.helper.make_attribute("of_a_later_version", 1))
    running = plugin_session(model, strict=False)
    (refusal,) = deltafuse.assignment(running).refused
    assert "attribute of_a_later_version is not one that this version of deltafuse knows" in refusal.reason
    release = tuple(int(part) for part in ort.__version__.split(".")[:2])
    assert ("means is not known here" if release >= MIN_ORT else "needs ONNX Runtime 1.32") in refusal.reason
    check(FULL, inputs, run(running, FULL, inputs), "float32")


def test_weights_stay_outside_of_the_arena_unless_the_caller_says_otherwise(tmp_path: Path) -> None:
    """What a session on a GPU asks ORT for, so that it can give back weights that kernels have packed."""
    entry = "session.use_device_allocator_for_initializers"
    options, own = quiet(), quiet()
    own.add_session_config_entry(entry, "0")
    for chosen in (options, own):
        _weights_outside_of_the_arena(chosen)
    assert (options.get_session_config_entry(entry), own.get_session_config_entry(entry)) == ("1", "0")
    model = call_model(FULL, draw_inputs(FULL, 2, np.random.default_rng(9)))
    path = tmp_path / "model.onnx"
    path.write_bytes(model.SerializeToString())
    assert first_op(path, ("QMoE", "GroupedQMoE")) == "GroupedQMoE"
    assert first_op(model.SerializeToString(), ("QMoE",)) == ""
