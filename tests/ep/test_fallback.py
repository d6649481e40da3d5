"""The fallback ladder of a fused node, TF32 for models with a router, and a caller's CUDA stream."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import deltafuse
import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from deltafuse import fallback, placement
from deltafuse.custom_ops.kda.body_ort import ORT_FORM_DOMAIN, build_ort_function, ort_refusal
from deltafuse.custom_ops.kda.reference import reference, relative_error, tolerance
from deltafuse.custom_ops.kda.spec import KdaConfig, cuda_refusal
from deltafuse.errors import DeltaFuseError, OptionError
from deltafuse.fallback import Step, lower, read_call, router_op, tf32_choice
from deltafuse.placement import checked_stream
from deltafuse.registry.targets import ort_op_refusal
from kda.configs import CONFIGS
from onnx import TensorProto, helper

from .call import SMALL, Arrays, call_model, draw, quiet, run

REFUSED = Step("KimiDeltaAttention", "kda", "head_dim 96: kernels take 64, 128, 192, 256")
ORT = (1, 32)
#: A geometry that the CUDA kernels refuse.
ODD = replace(SMALL, head_dim=96, head_v_dim=80)
RECTANGULAR = {name: config for name, config in CONFIGS.items() if not config.has_cu_seqlens}


def kda(model: onnx.ModelProto) -> onnx.NodeProto:
    return next(node for node in model.graph.node if node.domain == "deltafuse")


def on_ort(model: onnx.ModelProto) -> ort.InferenceSession:
    """A stock session of the lowered model in which ORT's op is sure to run."""
    lowered = lower(model.SerializeToString(), [REFUSED], ORT)
    assert [step.name for step in lowered.changed] == ["kda"], lowered.steps
    onnx.checker.check_model(onnx.load_from_string(lowered.model))
    options = quiet()
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    made = ort.InferenceSession(lowered.model, options, providers=["CPUExecutionProvider"])
    ran = [node.op_type for group in made.get_provider_graph_assignment_info() for node in group.get_nodes()]
    assert ran.count("LinearAttention") == 1, ran
    return made


def assert_close(got: Arrays, config: KdaConfig, inputs: Arrays, dtype: str, case: str = "normal") -> None:
    want = reference(config, inputs)
    errors = {name: relative_error(got[name], want[name]) for name in got}
    assert errors and max(errors.values()) <= tolerance("body", dtype, case), errors


@pytest.mark.parametrize("name", RECTANGULAR)
def test_ort_op_against_the_reference(name: str) -> None:
    config = RECTANGULAR[name]
    running = None
    for tokens, case in ((1, "normal"), (7, "gate-near-bound"), (70, "normal"), (40, "full-state")):
        inputs = draw(config, 2, tokens, tokens, case=case)
        running = running or on_ort(call_model(config, inputs))
        assert_close(run(running, config, inputs), config, inputs, "float32", case)


@pytest.mark.parametrize(("dtype", "state"), [("float16", "float32"), ("float16", "float16"), ("bfloat16", "bfloat16")])
def test_ort_op_with_short_types(dtype: str, state: str) -> None:
    inputs = draw(SMALL, 2, 33, dtype=dtype, state_dtype=state)
    running = on_ort(call_model(SMALL, inputs, dtype=dtype, state_dtype=state))
    assert_close(run(running, SMALL, inputs), SMALL, inputs, dtype)


@pytest.mark.parametrize("seq_len", [None, 1, 9])
def test_head_dim_that_the_cuda_kernels_refuse(seq_len: int | None) -> None:
    refused = cuda_refusal(ODD)
    assert refused is not None and "96" in refused.reason and ort_refusal(ODD) is None
    inputs = draw(ODD, 2, seq_len or 20)
    running = on_ort(call_model(ODD, inputs, seq_len=seq_len))
    assert_close(run(running, ODD, inputs), ODD, inputs, "float32")


def test_read_call_gives_what_was_written() -> None:
    for config in CONFIGS.values():
        model = call_model(config, draw(config, 1, 4), dtype="float16", state_dtype="float32", seq_len=4)
        call = read_call(kda(model))
        assert call.config == config
        assert (call.dtype, call.state_dtype) == (TensorProto.FLOAT16, TensorProto.FLOAT)
        assert call.seq_len == (None if config.has_cu_seqlens else 2)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"scale": 0.5}, "attribute scale 0.5 is not that of its function"),
        ({"head_dim": 16}, "its attributes are not those of its function"),
        ({"state_dtype": TensorProto.FLOAT16}, "its attributes are not those of its function"),
        ({"qk_l2norm": None}, "attribute qk_l2norm is missing"),
    ],
)
def test_nodes_that_do_not_fit_their_function_stay(change: dict[str, Any], reason: str) -> None:
    """Lowered, they would compute something else than their body."""
    model = call_model(SMALL, draw(SMALL, 1, 3))
    node = kda(model)
    for name, value in change.items():
        kept = [attribute for attribute in node.attribute if attribute.name != name]
        del node.attribute[:]
        node.attribute.extend(kept if value is None else [*kept, helper.make_attribute(name, value)])
    lowered = lower(model.SerializeToString(), [REFUSED], ORT)
    assert not lowered.model and not lowered.changed
    assert reason in lowered.steps[0].ort_reason


def test_reasons_why_ort_does_not_run_it() -> None:
    ragged = next(config for config in CONFIGS.values() if config.has_cu_seqlens)
    model = call_model(ragged, draw(ragged, 2, 6)).SerializeToString()
    assert "cu_seqlens" in lower(model, [REFUSED], ORT).steps[0].ort_reason
    on_gpu = lower(model, [REFUSED], ORT, on_gpu=True).steps[0].ort_reason
    assert "cu_seqlens" in on_gpu and "the CPU kernel is not used in a session on a GPU" in on_gpu
    plain = call_model(SMALL, draw(SMALL, 1, 3))
    assert "needs ONNX Runtime 1.27" in lower(plain.SerializeToString(), [REFUSED], (1, 26)).steps[0].ort_reason
    other = replace(REFUSED, name="another")
    assert lower(plain.SerializeToString(), [other], ORT).steps[0].ort_reason == "the node is not in the model's graph"
    assert "cannot be changed" in lower(b"ORTM no model", [REFUSED], ORT).steps[0].ort_reason
    kda(plain).overload = "by hand"
    assert "'by hand' does not say" in lower(plain.SerializeToString(), [REFUSED], ORT).steps[0].ort_reason
    assert ort_op_refusal("GatedDeltaNet", (1, 29)) is not None and ort_op_refusal("GatedDeltaNet", (1, 30)) is None
    assert ort_op_refusal("Unheard", ORT) is not None
    with pytest.raises(ValueError, match="cu_seqlens"):
        build_ort_function(ragged, 20)
    with pytest.raises(ValueError, match="opset 5"):
        build_ort_function(SMALL, 5)
    wide = replace(SMALL, head_dim=1024)
    assert "head_dim 1024" in str(ort_refusal(wide))
    for key_dim, value_dim, taken in ((128, 128, True), (96, 256, True), (160, 160, False), (256, 256, False)):
        config = replace(SMALL, head_dim=key_dim, head_v_dim=value_dim)
        assert ort_refusal(config) is None
        assert (ort_refusal(config, on_gpu=True) is None) == taken, (key_dim, value_dim)
    assert "bytes of shared memory on a GPU" in str(ort_refusal(config, on_gpu=True))


def test_the_model_that_is_given_is_not_changed() -> None:
    model = call_model(SMALL, draw(SMALL, 1, 3))
    before = model.SerializeToString()
    lowered = lower(before, [REFUSED], ORT)
    assert before == model.SerializeToString()
    after = onnx.load_from_string(lowered.model)
    assert [node.domain for node in after.graph.node if node.op_type == "KimiDeltaAttention"] == [ORT_FORM_DOMAIN]
    assert [function.domain for function in after.functions] == ["deltafuse", ORT_FORM_DOMAIN]


def refusing(inputs: Arrays, config: KdaConfig = SMALL) -> onnx.ModelProto:
    """A model whose node the plugin EP refuses for an attribute that it does not know."""
    model = call_model(config, inputs)
    kda(model).attribute.append(helper.make_attribute("window", 3))
    return model


def test_session_takes_the_next_step(library: str) -> None:
    inputs = draw(SMALL, 2, 12)
    made = deltafuse.session(refusing(inputs).SerializeToString(), device="cpu", sess_options=quiet())
    found = deltafuse.assignment(made)
    (node,) = found.refused
    assert node.name == "kda" and node.ep == "" and "window" in node.reason
    assert node.runs_as == "com.microsoft::LinearAttention on CPUExecutionProvider"
    assert "LinearAttention" in str(found) and "window" in str(found)
    assert any(other.op_type == "LinearAttention" for other in found.on("CPUExecutionProvider"))
    assert_close(run(made, SMALL, inputs), SMALL, inputs, "float32")


def test_strict_raises_with_node_and_reason(library: str) -> None:
    with pytest.raises(DeltaFuseError, match=r"KimiDeltaAttention 'kda': .*window"):
        deltafuse.session(refusing(draw(SMALL, 2, 3)).SerializeToString(), "cpu", sess_options=quiet(), strict=True)


def test_the_body_is_the_last_step(library: str) -> None:
    config = next(config for config in CONFIGS.values() if config.has_cu_seqlens)
    inputs = draw(config, 3, 20)
    made = deltafuse.session(refusing(inputs, config).SerializeToString(), device="cpu", sess_options=quiet())
    (node,) = deltafuse.assignment(made).refused
    assert "window" in node.reason and "takes no sequences of their own lengths" in node.reason and not node.runs_as
    assert_close(run(made, config, inputs), config, inputs, "float32")


def test_a_changed_model_that_ort_does_not_take(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = draw(SMALL, 2, 5)
    real = fallback.lower
    monkeypatch.setattr(fallback, "lower", lambda *given, **how: replace(real(*given, **how), model=b"garbage"))
    made = deltafuse.session(refusing(inputs).SerializeToString(), device="cpu", sess_options=quiet())
    (node,) = deltafuse.assignment(made).refused
    assert "did not take the changed model" in node.reason and not node.runs_as
    assert_close(run(made, SMALL, inputs), SMALL, inputs, "float32")


def test_models_with_external_data(library: str, tmp_path: Path) -> None:
    """The changed copy is in memory: its weights are still found beside the file."""
    inputs = draw(SMALL, 2, 5)
    model = ir.from_proto(refusing(inputs))
    weight = next(value for value in model.graph.inputs if value.name == "conv_weight")
    model.graph.inputs.remove(weight)
    weight.const_value = ir.tensor(inputs["conv_weight"], name="conv_weight")
    model.graph.register_initializer(weight)
    path = tmp_path / "model.onnx"
    onnx.save(ir.to_proto(model), path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    made = deltafuse.session(path, device="cpu", sess_options=quiet())
    assert deltafuse.assignment(made).refused[0].runs_as
    feeds = {name: x for name, x in inputs.items() if name != "conv_weight"}
    assert_close(run(made, SMALL, feeds), SMALL, inputs, "float32")


def router_model(op_type: str) -> bytes:
    node = helper.make_node(op_type, ["x", "k"], ["values", "indices"])
    graph = helper.make_graph([node], "g", [helper.make_tensor_value_info("x", TensorProto.FLOAT, [4])], [])
    return bytes(helper.make_model(graph).SerializeToString())


def test_tf32_is_off_with_a_router(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(router_model("TopK"))
    for model in (router_model("TopK"), path, str(path)):
        assert router_op(model) == "TopK"
        options, note = tf32_choice(model, {"arena": "1"})
        assert options == {"arena": "1", "use_tf32": "0"} and "TF32 is off" in note and "TopK" in note
    options, note = tf32_choice(path, {"use_tf32": "1"})
    assert options == {"use_tf32": "1"} and "as the caller set it (use_tf32 1)" in note
    for model in (router_model("Mul"), b"a text with TopK in it", tmp_path / "missing.onnx"):
        assert tf32_choice(model, {"a": "b"}) == ({"a": "b"}, "")
    assert router_op(router_model("QMoE")) == "QMoE"


@pytest.mark.parametrize(("given", "want"), [("0", "1"), ("1", "1"), ("2", "2"), ("0x7f00", str(0x7F00))])
def test_streams_of_the_session_device(given: str, want: str) -> None:
    """0 is the default stream: ORT takes 0 for "none given", the driver's handle for it is 1."""
    options = checked_stream({"user_compute_stream": given, "x": "y"}, 1, lambda stream: 1)
    assert options == {"user_compute_stream": want, "x": "y"}


def test_streams_that_are_refused() -> None:
    assert checked_stream({"x": "y"}, 0) == {"x": "y"}
    with pytest.raises(OptionError, match=r"a stream of cuda:1: the session is on cuda:0"):
        checked_stream({"user_compute_stream": "4096"}, 0, lambda stream: 1)
    for given in ("main", "-5", ""):
        with pytest.raises(OptionError, match="expected the stream's address as a number"):
            checked_stream({"user_compute_stream": given}, 0)


class FakeDriver:
    """libcuda with two devices; stream 0x100 is on the second, 0x200 is no stream."""

    def __init__(self) -> None:
        self.pushed = 0

    def cuInit(self, flags: int) -> int:
        return 0

    def cuStreamGetCtx(self, stream: Any, context: Any) -> int:
        return 400 if stream.value == 0x200 else 0

    def cuCtxPushCurrent_v2(self, context: Any) -> int:
        self.pushed += 1
        return 0

    def cuCtxPopCurrent_v2(self, context: Any) -> int:
        self.pushed -= 1
        return 0

    def cuCtxGetDevice(self, device: Any) -> int:
        device._obj.value = 11
        return 0

    def cuDeviceGetCount(self, count: Any) -> int:
        count._obj.value = 2
        return 0

    def cuDeviceGet(self, device: Any, ordinal: int) -> int:
        device._obj.value = 10 + ordinal
        return 0


def test_device_of_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeDriver()
    monkeypatch.setattr(placement, "_driver", lambda: driver)
    assert placement.device_of_stream(0x100) == 1 and driver.pushed == 0
    with pytest.raises(deltafuse.DeltaFuseError, match="cuStreamGetCtx failed with CUDA error 400"):
        placement.device_of_stream(0x200)


def test_session_checks_the_stream_before_ort_sees_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ort, "get_available_providers", lambda: ["CUDAExecutionProvider", "CPUExecutionProvider"])
    monkeypatch.setattr(placement, "_driver", lambda: FakeDriver())
    model = call_model(SMALL, draw(SMALL, 1, 2)).SerializeToString()
    options = {"CUDAExecutionProvider": {"user_compute_stream": 0x100}}
    with pytest.raises(OptionError, match="a stream of cuda:1: the session is on cuda:0"):
        deltafuse.session(model, "cuda:0", provider_options=options)


def test_relative_results_of_ort_and_kernel_agree(library: str) -> None:
    inputs = draw(SMALL, 2, 40)
    model = call_model(SMALL, inputs)
    ours = deltafuse.session(model.SerializeToString(), "cpu", sess_options=quiet(), strict=True)
    a, b = run(ours, SMALL, inputs), run(on_ort(model), SMALL, inputs)
    assert all(relative_error(a[name], b[name].astype(np.float64)) < 1e-5 for name in a)
