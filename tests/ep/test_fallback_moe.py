"""The ladder of GroupedQMoE: ONNX Runtime's QMoE, with the body's own router, where the kernels refuse a node."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path

import deltafuse
import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from deltafuse.custom_ops.moe.body_ort import MIN_ORT, build_ort_function, ort_refusal
from deltafuse.custom_ops.moe.draw import CASES, draw_inputs
from deltafuse.custom_ops.moe.reference import reference, relative_error, tolerance
from deltafuse.custom_ops.moe.spec import MoeConfig
from deltafuse.fallback import Step, lower
from deltafuse.registry.targets import parse_version
from moe.configs import CONFIGS
from moe.onnx_call import Arrays, call_model, run
from onnx import helper

from .call import quiet

BASE = MoeConfig(
    8, 3, 64, 32, 32, weight_format="int4", shared_format="int8", block_size=32, shared_block_size=32, n_group=4,
    topk_group=2, has_expert_bias=True, has_shared_gate=True, has_ids=True, norm_eps=1e-20, routed_scaling_factor=2.5,
)  # fmt: skip
#: What QMoE can be used for on a CPU.
TAKEN: dict[str, MoeConfig] = {
    "int4": BASE,
    "int4-zero-points": replace(BASE, has_zero_point=True),
    "uint4": replace(BASE, weight_format="uint4", has_zero_point=True, block_size=16),
    "odd-number-of-blocks": replace(
        BASE, hidden_size=96, intermediate_size=96, weight_format="uint4", has_zero_point=True
    ),
    "int4-rows": replace(BASE, block_size=0),
    "int8-rows": replace(BASE, weight_format="int8", block_size=0, has_shared_gate=False),
    "no-shared": MoeConfig(8, 2, 32, 16, weight_format="int4", block_size=16, score_function="softmax", has_ids=True),
    "gpt-oss": MoeConfig(
        8, 3, 64, 32, weight_format="int4", block_size=32, score_function="softmax", has_router_bias=True,
        activation_alpha=1.702, up_offset=1.0, clamp="before", gate_limit=0.7, up_limit=0.7, has_gate_up_bias=True,
        has_down_bias=True, has_ids=True,
    ),
    "zero-experts": replace(BASE, zero_experts=3, norm_topk_prob=0),
    "fewer-experts-than-choices": replace(BASE, zero_experts=6, n_group=1, topk_group=1),
    "by-logits": replace(BASE, choose_by_logits=1, norm_min=0.4),
    "given-logits": replace(BASE, has_router_weight=False),
}  # fmt: skip
REFUSED = Step("GroupedQMoE", "moe", "num_experts 2048: kernels take up to 1024")
HERE = parse_version(ort.__version__)
needs_qmoe = pytest.mark.skipif(HERE < MIN_ORT, reason=f"QMoE takes no weights of a router before {MIN_ORT}")


def on_ort(model: onnx.ModelProto, optimized: Path | None = None, *, on_gpu: bool = False) -> ort.InferenceSession:
    """A stock session of the lowered model in which ORT's op is sure to run."""
    lowered = lower(model.SerializeToString(), [REFUSED], HERE, on_gpu=on_gpu)
    assert [step.name for step in lowered.changed] == ["moe"], lowered.steps
    if not any(value.name == "y_call" for value in model.graph.value_info):  # which has no shape
        onnx.checker.check_model(onnx.load_from_string(lowered.model))
    options = quiet()
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    if optimized is not None:
        options.optimized_model_filepath = str(optimized)
    made = ort.InferenceSession(lowered.model, options, providers=["CPUExecutionProvider"])
    ran = [node.op_type for group in made.get_provider_graph_assignment_info() for node in group.get_nodes()]
    assert ran.count("QMoE") == 1 and "Loop" not in ran, ran
    return made


def check(config: MoeConfig, inputs: Arrays, got: Arrays, dtype: str, what: object) -> None:
    truth = reference(config, inputs)
    assert relative_error(got["y"], truth["y"]) <= tolerance("body", dtype), what
    assert np.array_equal(got["expert_ids"], truth["expert_ids"]), what
    assert relative_error(got["expert_weights"], truth["expert_weights"]) < 1e-6, what


@needs_qmoe
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("name", TAKEN)
def test_ort_op_against_the_reference(name: str, dtype: str) -> None:
    config, rng = TAKEN[name], np.random.default_rng(1)
    inputs = draw_inputs(config, (2, 3), rng, dtype=dtype)
    running = on_ort(call_model(config, inputs, dtype=dtype))
    for lead in ((2, 3), (1, 1), (3, 40), (0, 4)):
        fresh = draw_inputs(config, lead, rng, dtype=dtype)
        tokens = {name: fresh[name] if name in ("x", "router_logits") else x for name, x in inputs.items()}
        check(config, tokens, run(running, config, tokens), dtype, lead)


@needs_qmoe
@pytest.mark.parametrize("case", [case for case in CASES if case != "large-activations"])
def test_the_choice_is_the_same_to_the_last_bit(case: str) -> None:
    for name in ("int4", "zero-experts", "by-logits"):
        config = TAKEN[name]
        inputs = draw_inputs(config, 33, np.random.default_rng(2), case)
        check(config, inputs, run(on_ort(call_model(config, inputs)), config, inputs), "float32", name)


@needs_qmoe
@pytest.mark.parametrize("name", TAKEN)
def test_the_form_for_gpus_needs_no_router_weights(name: str) -> None:
    """GPU kernels leave that input out: the others make the weights. Run on a CPU, which has float16 too."""
    config, rng = TAKEN[name], np.random.default_rng(6)
    for case in ("normal", "ties", "one-expert"):
        inputs = draw_inputs(config, (2, 20), rng, case, dtype="float16")
        running = on_ort(call_model(config, inputs, dtype="float16"), on_gpu=True)
        check(config, inputs, run(running, config, inputs), "float16", (name, case))


@needs_qmoe
def test_weights_are_changed_once(tmp_path: Path) -> None:
    """When the session is made, not at each call."""
    for name in ("int4", "uint4", "int8-rows", "gpt-oss"):
        config = TAKEN[name]
        inputs = draw_inputs(config, 2, np.random.default_rng(3))
        on_ort(call_model(config, inputs), tmp_path / f"{name}.onnx")
        graph = onnx.load(tmp_path / f"{name}.onnx").graph
        constants = {tensor.name for tensor in graph.initializer}
        (node,) = (node for node in graph.node if node.op_type == "QMoE")
        changed = [value for i, value in enumerate(node.input) if value and i not in (0, 1, 14)]
        assert len(changed) >= 4 and set(changed) <= constants, name


@pytest.mark.parametrize(
    ("config", "on_gpu", "words"),
    [
        (replace(BASE, weight_format="float", block_size=0), False, "integers of 4 and 8 bits"),
        (CONFIGS["float8"], True, "integers of 4 and 8 bits"),
        (replace(BASE, activation="gelu"), False, "used with gated SiLU"),
        (replace(BASE, gated=0), False, "used with gated SiLU"),
        (replace(BASE, clamp="before", gate_limit=1.0, up_limit=2.0), False, "one limit for both"),
        (replace(BASE, clamp="after", gate_limit=1.0, up_limit=1.0), True, "on a GPU only"),
        (replace(BASE, block_size=24), False, "takes whole blocks"),
        (replace(BASE, block_size=8), False, "takes whole blocks"),
        (replace(BASE, hidden_size=80), False, "takes whole blocks"),
        (replace(BASE, weight_format="uint4"), False, "takes an offset off"),
        (replace(BASE, block_size=0, has_zero_point=True), False, "those of blocks"),
        (replace(BASE, weight_format="int8"), False, "rounds activations to 8 bits on a CPU"),
        (replace(BASE, weight_format="int8"), True, "rounds activations to 8 bits on a CPU"),
        (replace(BASE, routed_scaling_factor=-1.0), True, "weights above zero on a GPU"),
        (replace(BASE, routed_scaling_factor=-1.0), False, ""),
        (BASE, True, ""),
        (replace(BASE, top_k=9), False, "top_k 9"),
    ],
)
def test_reasons_why_ort_does_not_run_it(config: MoeConfig, on_gpu: bool, words: str) -> None:
    refused = ort_refusal(config, ir.DataType.FLOAT16, on_gpu=on_gpu)
    assert (words in refused.reason and words != "") if refused else words == ""
    if refused is not None:
        with pytest.raises(ValueError, match=words):
            build_ort_function(config, 20, ir.DataType.FLOAT16, on_gpu=on_gpu)


def test_nodes_that_are_not_known_stay() -> None:
    inputs = draw_inputs(BASE, 2, np.random.default_rng(4))

    def why(model: onnx.ModelProto, version: tuple[int, int] = MIN_ORT, on_gpu: bool = False) -> str:
        lowered = lower(model.SerializeToString(), [REFUSED], version, on_gpu=on_gpu)
        assert not lowered.model and not lowered.changed
        return lowered.steps[0].ort_reason

    assert "needs ONNX Runtime 1.32, this is 1.31" in why(call_model(BASE, inputs), (1, 31))
    on_gpu = why(call_model(BASE, inputs), on_gpu=True)
    assert "takes 16 bits on a GPU" in on_gpu and "the CPU kernel is not used in a session on a GPU" in on_gpu
    model = call_model(BASE, inputs)
    node = next(n for n in model.graph.node if n.op_type == "GroupedQMoE")
    node.attribute.append(helper.make_attribute("of_a_later_version", 1))
    assert "of_a_later_version means is not known" in why(model)
    model = call_model(BASE, inputs)
    node = next(n for n in model.graph.node if n.op_type == "GroupedQMoE")
    node.input[list(BASE.input_names()).index("down_scale")] = ""
    assert "are not those of its attributes" in why(model)


def test_a_node_that_is_read_alone_is_no_invalid_model(caplog: pytest.LogCaptureFixture) -> None:
    model = call_model(BASE, draw_inputs(BASE, 2, np.random.default_rng(6)))
    lower(model.SerializeToString(), [REFUSED], MIN_ORT, on_gpu=False)
    assert not caplog.records


def test_on_a_gpu_it_computes_in_the_activations_type() -> None:
    """Which is all that its kernels there take; on a CPU in float32."""
    for on_gpu, kind in ((True, ir.DataType.BFLOAT16), (False, ir.DataType.FLOAT)):
        function = build_ort_function(TAKEN["gpt-oss"], 20, ir.DataType.BFLOAT16, on_gpu=on_gpu)
        (node,) = (node for node in function if node.op_type == "QMoE")
        casts = [v.producer() for i, v in enumerate(node.inputs) if v is not None and i not in (2, 5)]
        assert (len(node.inputs) > 14) is not on_gpu  # router_weights, which a GPU's kernels leave out
        assert {cast.attributes["to"].as_int() for cast in casts if cast is not None} == {int(kind)}


@needs_qmoe
def test_session_takes_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here where the plugin EP serves no device at all."""
    monkeypatch.setattr(importlib.import_module("deltafuse.session"), "_plugin_devices", lambda _: ({}, "no plugin"))
    config = TAKEN["gpt-oss"]
    inputs = draw_inputs(config, 5, np.random.default_rng(5))
    made = deltafuse.session(call_model(config, inputs).SerializeToString(), device="cpu", sess_options=quiet())
    (node,) = deltafuse.assignment(made).refused
    assert node.runs_as == "com.microsoft::QMoE on CPUExecutionProvider" and "no plugin" in node.reason, node
    check(config, inputs, run(made, config, inputs), "float32", "session")
