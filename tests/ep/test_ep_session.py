"""deltafuse.register, session and assignment."""

from __future__ import annotations

import builtins
import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import deltafuse
import numpy as np
import onnx
import onnxruntime as ort
import pytest
from deltafuse.assigned import NodeAssignment
from deltafuse.custom_ops.kda.reference import reference, relative_error, tolerance
from deltafuse.discovery import EP_NAME, PluginError
from deltafuse.errors import DeltaFuseError, OptionError, OrtError
from deltafuse.onnx_file import versions
from onnx import TensorProto, helper

from .call import SMALL, call_model, draw, quiet, run

INPUTS = draw(SMALL, 2, 3)
CALL = ("deltafuse", "KimiDeltaAttention")


def model_bytes(**attributes: Any) -> bytes:
    """The model of one call, with attributes of the node changed."""
    model = call_model(SMALL, INPUTS)
    node = next(node for node in model.graph.node if node.domain == "deltafuse")
    for name, value in attributes.items():
        kept = [attribute for attribute in node.attribute if attribute.name != name]
        del node.attribute[:]
        node.attribute.extend([*kept, helper.make_attribute(name, value)])
    return model.SerializeToString()


def test_register_twice(library: str) -> None:
    assert deltafuse.register() == deltafuse.register() == deltafuse.get_ep_name() == EP_NAME
    assert deltafuse.get_ep_names() == [EP_NAME]
    devices = [device for device in ort.get_ep_devices() if device.ep_name == EP_NAME]
    cpu = [device for device in devices if device.ep_metadata["deltafuse_device"] == "cpu"]
    assert len(cpu) == 1
    assert cpu[0].ep_metadata["version"] == deltafuse.build_info()["version"] or not deltafuse.build_info()["native"]
    assert cpu[0].ep_metadata["library_path"] == library


@pytest.mark.usefixtures("library")
def test_cpu_session_and_assignment() -> None:
    for device in ("auto", "cpu"):
        made = deltafuse.session(model_bytes(), device=device, strict=True)
        assert EP_NAME in made.get_providers()
        found = deltafuse.assignment(made)
        assert found == [NodeAssignment(EP_NAME, *CALL, "kda")]
        assert found.fused and not found.refused and found.counts() == {EP_NAME: 1}
        assert "kda" in str(found)
        got = run(made, SMALL, INPUTS)
        want = reference(SMALL, INPUTS)
        assert all(relative_error(got[name], want[name]) <= tolerance("cpu", "float32") for name in want)


@pytest.mark.usefixtures("library")
def test_path_and_options(tmp_path: Any) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(model_bytes())
    options = quiet()
    options.intra_op_num_threads = 1
    for given in (path, str(path)):
        assert deltafuse.assignment(deltafuse.session(given, sess_options=quiet())).fused
    deltafuse.session(path, sess_options=options)
    with pytest.raises(OptionError, match="already has providers"):
        deltafuse.session(path, sess_options=options)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"head_dim": 7}, "expected [any, any, 14]"),
        ({"num_v_heads": 3}, "num_v_heads 3 is not a multiple of num_heads 2"),
        ({"num_heads": 0}, "num_heads 0: expected 1 to 65536"),
        ({"head_dim": 1 << 40}, "expected 1 to 65536"),
        ({"qk_l2norm": "mean"}, "qk_l2norm 'mean': expected one of none, sum, max"),
        ({"gate_activation": "none"}, "A_log without a gate_activation"),
        ({"output_gate": "none"}, "gate without an output_gate"),
        ({"state_layout": "VK"}, "initial_state has shape"),
        ({"conv_state_width": 2}, "conv_state_width 2: expected 3 or 4"),
        ({"lower_bound": 1.0}, "lower_bound 1: the log decay must be negative"),
        ({"scale": float("nan")}, "scale is not finite"),
        ({"qk_l2norm": 1}, "attribute qk_l2norm"),
        ({"window": 3}, "attribute window"),
    ],
)
def test_refusals_have_reasons(library: str, changes: dict[str, Any], reason: str) -> None:
    """What the kernel would not run is refused when the graph is partitioned: the body, which is unchanged, runs."""
    made = deltafuse.session(model_bytes(**changes), device="cpu", sess_options=quiet())
    found = deltafuse.assignment(made)
    assert not found.fused
    assert [node.op_type for node in found.refused] == ["KimiDeltaAttention"]
    assert reason in found.refused[0].reason, found.refused
    assert found.refused[0].name == "kda"
    got, want = run(made, SMALL, INPUTS), reference(SMALL, INPUTS)
    assert all(relative_error(got[name], want[name]) <= tolerance("body", "float32") for name in want)
    with pytest.raises(DeltaFuseError, match="does not run 1 of the model's nodes"):
        deltafuse.session(model_bytes(**changes), device="cpu", sess_options=quiet(), strict=True)


def test_missing_attribute_is_refused(library: str) -> None:
    model = call_model(SMALL, INPUTS)
    node = next(node for node in model.graph.node if node.domain == "deltafuse")
    kept = [attribute for attribute in node.attribute if attribute.name != "scale"]
    del node.attribute[:]
    node.attribute.extend(kept)
    made = deltafuse.session(model.SerializeToString(), sess_options=quiet())
    assert "attribute scale is missing" in deltafuse.assignment(made).refused[0].reason


def test_other_functions_of_the_domain_are_refused_with_a_reason(library: str) -> None:
    function = helper.make_function(
        "deltafuse", "Unheard", ["x"], ["y"], [helper.make_node("Neg", ["x"], ["y"])], [helper.make_opsetid("", 20)]
    )
    graph = helper.make_graph(
        [helper.make_node("Unheard", ["x"], ["y"], domain="deltafuse")],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [2])],
    )
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("deltafuse", 1)]
    model = helper.make_model(graph, opset_imports=opsets, functions=[function], ir_version=10)
    made = deltafuse.session(model.SerializeToString(), sess_options=quiet())
    refused = deltafuse.assignment(made).refused
    assert [(node.name, node.op_type) for node in refused] == [("y", "Unheard")]
    assert "no kernel for deltafuse::Unheard version 1" in refused[0].reason
    np.testing.assert_array_equal(made.run(None, {"x": np.array([1, -2], np.float32)})[0], [-1, 2])


def test_refusals_of_sessions_stay_apart(library: str) -> None:
    first = deltafuse.session(model_bytes(window=3), sess_options=quiet())
    second = deltafuse.session(model_bytes(qk_l2norm="mean"), sess_options=quiet())
    third = deltafuse.session(model_bytes(), sess_options=quiet())
    assert "window" in deltafuse.assignment(first).refused[0].reason
    del first
    assert [("mean" in node.reason) for node in deltafuse.assignment(second).refused] == [True]
    assert deltafuse.assignment(third).refused == []


def test_calls_inside_a_loop_run_on_the_plugin(library: str) -> None:
    """GetCapability is asked for subgraphs too."""
    config = replace(SMALL, conv_width=0, conv_state_width=0, conv_activation="none")
    config = replace(config, has_conv_state=False, has_present_conv_state=False)
    inputs = draw(config, 1, 4)
    model = call_model(config, inputs)
    body_nodes = list(model.graph.node)
    state = next(value for value in model.graph.input if value.name == "initial_state")
    outer = [value for value in model.graph.input if value.name != "initial_state"]
    by_name = {value.name: value for value in model.graph.output}
    ok_in = helper.make_tensor_value_info("ok_in", TensorProto.BOOL, [])
    ok_out = helper.make_tensor_value_info("ok_out", TensorProto.BOOL, [])
    body = helper.make_graph(
        [helper.make_node("Identity", ["ok_in"], ["ok_out"]), *body_nodes],
        "body",
        [helper.make_tensor_value_info("i", TensorProto.INT64, []), ok_in, state],
        [ok_out, by_name["final_state"], by_name["o"]],
    )
    loop = helper.make_node("Loop", ["trips", "", "start"], ["last", "all"], body=body)
    start = onnx.ValueInfoProto()
    start.CopyFrom(state)
    start.name = "start"
    last = helper.make_tensor_value_info("last", TensorProto.FLOAT, None)
    everything = helper.make_tensor_value_info("all", TensorProto.FLOAT, None)
    trips = helper.make_tensor("trips", TensorProto.INT64, [], [2])
    graph = helper.make_graph([loop], "g", [*outer, start], [last, everything], [trips])
    looped = helper.make_model(
        graph, opset_imports=model.opset_import, functions=model.functions, ir_version=model.ir_version
    )
    made = deltafuse.session(looped.SerializeToString(), sess_options=quiet(), strict=True)
    assert [node.name for node in deltafuse.assignment(made).fused] == ["kda"]
    feeds = {name: x for name, x in inputs.items() if name != "initial_state"} | {"start": inputs["initial_state"]}
    final, outputs = made.run(None, feeds)
    once = reference(config, inputs)
    twice = reference(config, inputs | {"initial_state": once["final_state"].astype(np.float32)})
    allowed = tolerance("cpu", "float32")
    assert relative_error(outputs[0], once["o"]) <= allowed
    assert relative_error(outputs[1], twice["o"]) <= allowed
    assert relative_error(final, twice["final_state"]) <= allowed


@pytest.mark.parametrize("device", ["gpu", "cpu:0", "cuda:", "cuda:x", "", "cuda:\u00b2", "cuda:\u0661", 5, None])
def test_unknown_devices(device: Any) -> None:
    for make in (deltafuse.session, deltafuse.capture):
        with pytest.raises(OptionError, match="expected 'auto', 'cpu', 'cuda' or 'cuda:N'"):
            make(model_bytes(), device=device)


def test_unknown_providers_and_options(library: str) -> None:
    with pytest.raises(OptionError, match="TensorrtExecutionProvider"):
        deltafuse.session(model_bytes(), provider_options={"TensorrtExecutionProvider": {}})
    with pytest.raises(OptionError, match="provider_options for 1, 2: session"):
        deltafuse.session(model_bytes(), provider_options={2: {}, 1: {}})
    with pytest.raises(OptionError, match=r"^DeltaFuseExecutionProvider: there is no option 'turbo': there are"):
        deltafuse.session(model_bytes(), sess_options=quiet(), provider_options={EP_NAME: {"turbo": "1"}})
    with pytest.raises(OptionError, match=r"expected an onnxruntime\.SessionOptions"):
        deltafuse.session(model_bytes(), sess_options=ort.SessionOptions)  # the class, not one of it


@pytest.mark.skipif("CUDAExecutionProvider" in ort.get_available_providers(), reason="this onnxruntime has CUDA")
def test_cuda_is_not_replaced_by_the_cpu() -> None:
    with pytest.raises(OrtError, match="no CUDAExecutionProvider; onnxruntime-gpu has"):
        deltafuse.session(model_bytes(), device="cuda")


@pytest.mark.skipif("CUDAExecutionProvider" in ort.get_available_providers(), reason="this onnxruntime has CUDA")
def test_auto_warns_when_the_gpu_cannot_be_used(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules[deltafuse.session.__module__]
    monkeypatch.setattr(module, "_best_device", lambda ort, devices: ("cuda", 0, ""))
    with pytest.warns(RuntimeWarning, match="the GPU is not used: cuda:0: this onnxruntime has no CUDA"):
        made = deltafuse.session(model_bytes(), sess_options=quiet(), strict=True)
    found = deltafuse.assignment(made)
    assert found.fused and found.note.startswith("the GPU is not used")


def test_without_the_library_bodies_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> str:
        raise PluginError("it was not built: no compiler")

    module = sys.modules[deltafuse.session.__module__]
    monkeypatch.setattr(module, "_ep_devices", lambda ort: [])
    monkeypatch.setattr(module, "get_library_path", missing)
    made = deltafuse.session(model_bytes(), sess_options=quiet())
    assert list(made.get_providers()) == ["CPUExecutionProvider"]
    found = deltafuse.assignment(made)
    ort_op = "com.microsoft::LinearAttention on CPUExecutionProvider"
    assert found.refused == [NodeAssignment("", *CALL, "kda", "it was not built: no compiler", ort_op)]
    assert found.note == "it was not built: no compiler" and found.note in str(found)
    got, want = run(made, SMALL, INPUTS), reference(SMALL, INPUTS)
    assert all(relative_error(got[name], want[name]) <= tolerance("body", "float32") for name in want)
    with pytest.raises(DeltaFuseError, match="not built"):
        deltafuse.session(model_bytes(), strict=True)
    with pytest.raises(PluginError):
        deltafuse.register()


def test_assignment_of_a_session_without_a_record() -> None:
    plain = ort.InferenceSession(model_bytes(), quiet(), providers=["CPUExecutionProvider"])
    with pytest.raises(OptionError, match="record_ep_graph_assignment_info"):
        deltafuse.assignment(plain)


def test_assignment_of_a_session_made_by_hand(library: str) -> None:
    deltafuse.register()
    devices = [device for device in ort.get_ep_devices() if device.ep_name == EP_NAME]
    options = quiet()
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    options.add_provider_for_devices(devices[:1], {})
    made = ort.InferenceSession(model_bytes(), options)
    assert [node.name for node in deltafuse.assignment(made).fused] == ["kda"]


def test_old_and_missing_onnxruntime(monkeypatch: pytest.MonkeyPatch) -> None:
    old = types.ModuleType("onnxruntime")
    old.__version__ = "1.26.2"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "onnxruntime", old)
    with pytest.raises(OrtError, match=r"onnxruntime 1\.26\.2 is too old: deltafuse needs 1\.27 or newer"):
        deltafuse.register()
    monkeypatch.delitem(sys.modules, "onnxruntime")
    real = builtins.__import__

    def no_onnxruntime(name: str, *rest: Any, **named: Any) -> Any:
        if name == "onnxruntime":
            raise ImportError("No module named 'onnxruntime'")
        return real(name, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", no_onnxruntime)
    with pytest.raises(OrtError, match="pip install onnxruntime"):
        deltafuse.register()


@pytest.mark.parametrize("given_as", ["path", "bytes"])
@pytest.mark.parametrize(("opset", "ir_version", "what"), [(99, 10, "opset 99"), (20, 99, "IR version 99")])
def test_a_model_that_is_too_new_for_this_onnxruntime(
    opset: int, ir_version: int, what: str, given_as: str, tmp_path: Path
) -> None:
    """It says which onnxruntime is needed, not only that this one does not load it."""
    model = call_model(SMALL, draw(SMALL, 1, 3))
    model.ir_version = ir_version
    next(entry for entry in model.opset_import if entry.domain == "").version = opset
    path = tmp_path / "new.onnx"
    path.write_bytes(model.SerializeToString())
    given = path if given_as == "path" else path.read_bytes()
    with pytest.raises(OrtError, match=rf"the model has {what}: onnxruntime .* loads up to \d+; it needs a newer"):
        deltafuse.session(given, "cpu", sess_options=quiet())


def test_versions_of_a_model() -> None:
    model = call_model(SMALL, draw(SMALL, 1, 3))
    want = (next(entry.version for entry in model.opset_import if entry.domain == ""), model.ir_version)
    assert len(model.opset_import) > 1 and versions(model.SerializeToString()) == want
    for entry in model.opset_import:
        entry.domain = entry.domain or "ai.onnx"
    assert versions(model.SerializeToString()) == want
    assert versions(b"") == versions(b"\xff\xff") == versions(b"\x08") == (0, 0)
