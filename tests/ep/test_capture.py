"""deltafuse.capture: states, shapes, warm-up, capture and replay, with a CPU session and stand-ins for CUDA."""

from __future__ import annotations

import threading
import types
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import deltafuse
import ml_dtypes
import numpy as np
import onnxruntime as ort
import pytest
from deltafuse.capture_device import HostDevice
from deltafuse.capture_states import first_shape
from deltafuse.custom_ops.kda.reference import reference, relative_error, tolerance
from deltafuse.errors import DeltaFuseError, ModelKindError, OptionError
from onnx import TensorProto, helper, parser

from .call import SMALL, Arrays, call_model, draw, quiet
from .capture_kit import FakeDevice, counter, growing, kda_session, module, runner

STATES = {"conv_state": "present_conv_state", "initial_state": "final_state"}


def steps(config: Any, inputs: Arrays, count: int) -> Arrays:
    """The reference after ``count`` runs of the same tokens."""
    out: Arrays = {}
    for _ in range(count):
        out = {name: np.asarray(x, np.float32) for name, x in reference(config, inputs).items()}
        inputs = inputs | {"conv_state": out["present_conv_state"], "initial_state": out["final_state"]}
    return out


def assert_step(made: Any, got: Arrays, want: Arrays) -> None:
    states = made.state_arrays()
    got = got | {output: states[name] for name, output in STATES.items()}
    errors = {name: relative_error(got[name], want[name]) for name in want}
    assert max(errors.values()) <= tolerance("cpu", "float32"), errors


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("tokens", [1, 5])
def test_replayed_steps_of_kda(tokens: int, in_place: bool, monkeypatch: pytest.MonkeyPatch, library: str) -> None:
    inputs = draw(SMALL, 2, tokens)
    device = FakeDevice()
    session = deltafuse.session(call_model(SMALL, inputs).SerializeToString(), "cpu", sess_options=quiet(), strict=True)
    made = runner(session, device, monkeypatch, in_place=in_place)
    assert made.states == STATES and made.outputs == ("o",)
    made.reset({name: inputs[name] for name in STATES})
    feeds = {name: inputs[name] for name in made.inputs}
    for count in range(1, 9):
        assert_step(made, made.run(feeds), steps(SMALL, inputs, count))
    sides = 1 if in_place else 2
    assert device.events == ["capture"] * sides + ["launch"] * 5
    assert len(made.captured) == 1 and f"q 2x{tokens}x16" in made.captured[0] and not made.not_captured
    made.reset({name: inputs[name] for name in STATES})
    assert_step(made, made.run(feeds), steps(SMALL, inputs, 1))
    assert device.events[-1] == "launch"


def test_a_cpu_session_runs_eagerly_with_the_same_face() -> None:
    inputs = draw(SMALL, 2, 3)
    made = deltafuse.capture(call_model(SMALL, inputs).SerializeToString(), device="cpu", sess_options=quiet())
    feeds = {name: inputs[name] for name in made.inputs}
    made.reset({name: inputs[name] for name in STATES})
    assert made.prepare(feeds) is False
    for count in (1, 2, 3):
        assert_step(made, made(**feeds), steps(SMALL, inputs, count))
    assert made.captured == [] and set(made.not_captured.values()) == {"the session is on the CPU"}
    with pytest.raises(module.CaptureError, match="the session is on the CPU"):
        deltafuse.capture(call_model(SMALL, inputs).SerializeToString(), device="cpu", graphs="always")


def test_prompt_pieces_and_steps_share_the_states(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice()
    made = runner(counter(), device, monkeypatch, warmup=1)
    assert made.states == {"s": "new_s"}
    rng = np.random.default_rng(0)
    total = np.zeros((1, 1, 2), np.float32)
    for tokens in [4, 1, 1, 4, 1, 4, 4, 4, 1, 1, 1, 1, 4]:
        x = rng.integers(0, 9, (1, tokens, 2)).astype(np.float32)
        np.testing.assert_array_equal(made(x=x)["y"], x + total)
        total += x.sum(1, keepdims=True)
        np.testing.assert_array_equal(made.state_arrays()["s"], total)
    assert sorted(made.captured) == ["x 1x1x2, s 1x1x2", "x 1x4x2, s 1x1x2"]


def test_the_cache_of_shapes_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice()
    made = runner(counter(), device, monkeypatch, cache=2)
    for tokens in (1, 2, 3, 1):
        made.reset()
        assert made.prepare({"x": np.ones((1, tokens, 2), np.float32)})
    assert made.captured == ["x 1x3x2, s 1x1x2", "x 1x1x2, s 1x1x2"]
    assert [graph.closed for graph in device.graphs] == [True] * 4 + [False] * 4
    made.close()
    made.close()
    assert all(graph.closed for graph in device.graphs)
    with pytest.raises(DeltaFuseError, match="the runner is closed"):
        made(x=np.ones((1, 1, 2), np.float32))


def test_batches_of_other_sizes_begin_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    made = runner(counter(), FakeDevice(), monkeypatch, warmup=1)
    for batch in (1, 3, 1, 3):
        made.reset()
        total = np.zeros((batch, 1, 2), np.float32)
        for _ in range(5):
            x = np.full((batch, 1, 2), batch, np.float32)
            np.testing.assert_array_equal(made(x=x)["y"], x + total)
            total += x
    assert len(made.captured) == 2


def test_prepare_leaves_the_states(monkeypatch: pytest.MonkeyPatch) -> None:
    made = runner(counter(), FakeDevice(), monkeypatch)
    made.reset({"s": np.full((1, 1, 2), 7, np.float32)})
    x = np.ones((1, 1, 2), np.float32)
    assert made.prepare({"x": x})
    np.testing.assert_array_equal(made.state_arrays()["s"], np.full((1, 1, 2), 7))
    np.testing.assert_array_equal(made(x=x)["y"], np.full((1, 1, 2), 8))
    assert made.device.events[-1] == "launch"


@pytest.mark.parametrize("graphs", ["auto", "always"])
def test_growing_states_run_eagerly(graphs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = runner(growing(), FakeDevice(), monkeypatch, graphs=graphs)
    assert made.states == {"past_0_key": "present_0_key", "past_0_state": "present_0_state"}
    x = np.ones((2, 3, 2), np.float32)
    if graphs == "always":
        with pytest.raises(module.CaptureError, match=r"past_0_key 2x0x2.*the states grow with every step"):
            made(x=x)
        return
    for count in (1, 2, 3):
        np.testing.assert_array_equal(made(x=x)["y"], np.full((2, 1, 2), 3 * count))
        np.testing.assert_array_equal(
            made.state_arrays()["past_0_state"], np.full((2, 1, 2), 3 * sum(range(count + 1)))
        )
    assert made.state_values()["past_0_key"].shape() == [2, 9, 2]
    assert "grow" in next(iter(made.not_captured.values())) and not made.captured


def test_what_cannot_be_captured_says_which_node(monkeypatch: pytest.MonkeyPatch) -> None:
    options = quiet()
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    session = ort.InferenceSession(
        parser.parse_model(
            """
            <ir_version: 8, opset_import: ["" : 20]>
            g (float[1, 2, 3] x, float[1, 2, 3] s) => (float[1, 2, 3] y, float[1, 2, 3] new_s) {
              y = Sin (x)
              new_s = Add (s, y)
            }
            """
        ).SerializeToString(),
        options,
        providers=["CPUExecutionProvider"],
    )
    x = np.ones((1, 2, 3), np.float32)
    device = FakeDevice("cuStreamEndCapture: CUDA_ERROR_STREAM_CAPTURE_INVALIDATED")
    made = runner(session, device, monkeypatch)
    for count in range(6):
        np.testing.assert_allclose(made.run({"x": x})["y"], np.sin(x), rtol=1e-6)
        np.testing.assert_allclose(made.state_arrays()["s"], (count + 1) * np.sin(x), rtol=1e-6)
    (reason,) = made.not_captured.values()
    assert "INVALIDATED" in reason and "on the CPU run" in reason and "Sin" in reason
    assert device.events == ["capture"], "a capture that failed is not tried again"
    made = runner(session, FakeDevice("refused"), monkeypatch, graphs="always")
    with pytest.raises(module.CaptureError, match=r"cannot be captured: refused; on the CPU run .*Sin"):
        for _ in range(6):
            made.run({"x": x})
    made = runner(session, FakeDevice(), monkeypatch, graphs="never")
    assert not made.prepare({"x": x}) and 'graphs="never"' in next(iter(made.not_captured.values()))


def test_arrays_values_and_dlpack(monkeypatch: pytest.MonkeyPatch) -> None:
    made = runner(counter(), FakeDevice(), monkeypatch)
    x = np.arange(4, dtype=np.float32).reshape(1, 2, 2)

    class Tensor:
        def __dlpack__(self, **how: Any) -> Any:
            return x.__dlpack__()

        def __dlpack_device__(self) -> Any:
            return x.__dlpack_device__()

    total = np.zeros((1, 1, 2), np.float32)
    for given in (x, ort.OrtValue.ortvalue_from_numpy(x), Tensor(), x[:, ::-1][:, ::-1], x.tolist()):
        values = made.run({"x": given}, values=True)
        assert isinstance(values["y"], ort.OrtValue)
        np.testing.assert_array_equal(np.from_dlpack(values["y"]), x + total)
        total += x.sum(1, keepdims=True)
    first = made(x=x)["y"]
    kept = first.copy()
    made(x=2 * x)
    np.testing.assert_array_equal(first, kept, err_msg="an array that was returned is the caller's own")
    assert made.state_values()["s"].shape() == [1, 1, 2]
    made.synchronize()


@pytest.mark.parametrize(
    ("feeds", "message"),
    [
        ({}, "inputs missing: x; expected x"),
        ({"x": 0, "s": 1}, "inputs unknown: s; expected x"),
        ({"X": 0}, "inputs missing: x, unknown: X; expected x"),
        ({"x": np.ones((1, 1, 2))}, "x is a float64: expected float32"),
        ({"x": "text"}, "x is a <U4: expected float32"),
        ({"x": None}, "x is a object: expected float32"),
        ({"x": [[[1, 2], [3]]]}, "x: .*inhomogeneous"),
        (5, "inputs 5: expected values by input name, x"),
        (None, "inputs None: expected values by input name"),
        ({"x": 0, 5: 1}, "inputs unknown: 5; expected x"),
    ],
)
def test_feeds_that_do_not_fit(feeds: Any, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = runner(counter(), FakeDevice(), monkeypatch)
    with pytest.raises(OptionError, match=message):
        made.run(feeds)


@pytest.mark.parametrize(
    ("kind", "given", "taken"),
    [
        ("int64", [1.5], False),
        ("int64", [1.0], False),
        ("int64", [True], True),
        ("int64", [2**70], False),
        ("int8", [100, -100], True),
        ("int8", [100, 300], False),
        ("bool", [1, 0], True),
        ("bool", [2], False),
        ("float16", [1, 0.1], True),
        ("int64", [], True),
    ],
)
def test_lists_become_what_they_hold(kind: str, given: Any, taken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A list has no type of its own, but no value in it may become another: a token 1.5 is no token 1."""
    model = parser.parse_model(
        f'<ir_version: 8, opset_import: ["" : 20]> g ({kind}[n] x) => ({kind}[n] y) {{ y = Identity (x) }}'
    )
    session = ort.InferenceSession(model.SerializeToString(), quiet(), providers=["CPUExecutionProvider"])
    made = runner(session, FakeDevice(), monkeypatch)
    if not taken:
        with pytest.raises(OptionError, match=f"x is a .*: expected {kind}"):
            made.run({"x": given})
        return
    np.testing.assert_array_equal(made.run({"x": given})["y"], np.array(given, kind))


def test_arguments_that_are_not_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    session = counter()
    for how, message in (
        ({"graphs": "often"}, "graphs 'often'"),
        ({"warmup": 0}, "warmup 0"),
        ({"cache": 0}, "cache 0"),
        ({"states": "guess"}, "states 'guess'"),
        ({"states": {"a": "new_s"}}, "no input 'a', it has x, s"),
        ({"states": {"s": "b"}}, "no output 'b', it has y, new_s"),
        ({"states": {"s": "y", "x": "y"}}, "named twice"),
        ({"device": "cpu"}, "are for a path, not for a session"),
    ):
        with pytest.raises(OptionError, match=message):
            deltafuse.capture(session, **how)  # type: ignore[arg-type]
    made = runner(session, FakeDevice(), monkeypatch)
    for states, message in (
        ({"z": np.ones(1, np.float32)}, "z: no state, the states are s"),
        ({"z": "text"}, "z: no state, the states are s"),
        ({5: 1}, "5: no state, the states are s"),
        (5, "states 5: expected arrays by input name"),
    ):
        with pytest.raises(OptionError, match=message):
            made.reset(states)
    with pytest.raises(ModelKindError, match=r"got builtins\.type; an InferenceSession is taken too"):
        deltafuse.capture(ort.InferenceSession)  # the class, not one of it
    assert deltafuse.capture(session, states={}).states == {}


def value(name: str, kind: str, *shape: int | str) -> Any:
    return types.SimpleNamespace(name=name, type=f"tensor({kind})", shape=list(shape))


def io(inputs: list[Any], outputs: list[Any]) -> Any:
    return types.SimpleNamespace(get_inputs=lambda: inputs, get_outputs=lambda: outputs)


def test_states_are_found() -> None:
    ids, logits = value("input_ids", "int64", 1, 1), value("logits", "float", 1, 1, 64)
    for given, made in (
        ("past.0.state", "present.0.state"),
        ("past_key_values.3.key", "present.3.key"),
        ("input.cache.layers.0.conv_states.0", "output.cache.layers.0.conv_states.0"),
        ("initial_state", "final_state"),
        ("s", "new_s"),
        ("h", "h_out"),
    ):
        session = io([ids, value(given, "float", 1, 4)], [logits, value(made, "float", 1, 4)])
        assert module.pair_states(session, "auto") == {given: made}
    flat = [value("flat_0", "float", 1, 192, 4), value("flat_1", "float", 1, 1, "past", 32)]
    outs = [value("copy", "float", 1, 192, 4), value("cat", "float", 1, 1, "past + 1", 32)]
    assert module.pair_states(io([ids, *flat], [logits, *outs]), "auto") == {"flat_0": "copy", "flat_1": "cat"}
    # not states: other sizes, other types, fewer dimensions, and the only input and output
    for one, other in (
        (value("a", "float", 1, 2, 3), value("b", "float", 1, 2, 4)),
        (value("a", "float", 1, 2, 3), value("b", "float16", 1, 2, 3)),
        (value("a", "float", 1, 2), value("b", "float", 1, 2)),
        (value("a", "int64", 1, 2, 3), value("b", "int64", 1, 2, 3)),
    ):
        assert module.pair_states(io([ids, one], [logits, other]), "auto") == {}
    same = value("x", "float", 1, 2, 3)
    assert module.pair_states(io([same], [value("y", "float", 1, 2, 3)]), "auto") == {}
    with pytest.raises(OptionError, match=r"s is a tensor\(float\), t a tensor\(int64\)"):
        module.pair_states(io([value("s", "float", 1)], [value("t", "int64", 1)]), {"s": "t"})
    assert first_shape(["B", 3, "past", "8"], {"B": 2}) == (2, 3, 0, 8)


def test_threads_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    made = runner(counter(), FakeDevice(), monkeypatch)
    x = np.ones((1, 1, 2), np.float32)
    with ThreadPoolExecutor(4) as pool:
        results = sorted(float(y["y"][0, 0, 0]) for y in pool.map(lambda _: made(x=x), range(40)))
    assert results == [float(i + 1) for i in range(40)]
    assert threading.active_count() >= 1


def test_short_floats_come_back_as_they_are() -> None:
    node = helper.make_node("Add", ["x", "s"], ["new_s"])
    other = helper.make_node("Neg", ["x"], ["y"])
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT16, [1, 2, 2]) for name in ("x", "s", "y", "new_s")]
    graph = helper.make_graph([node, other], "g", values[:2], values[2:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=8)
    made = deltafuse.capture(model.SerializeToString(), device="cpu", sess_options=quiet())
    assert made(x=np.ones((1, 2, 2), np.float16))["y"].dtype == np.float16
    device = HostDevice()
    held = device.empty((2, 3), TensorProto.BFLOAT16)
    want = np.arange(6).reshape(2, 3).astype(ml_dtypes.bfloat16)
    device.write(held, want)
    got = device.read(held)
    assert got.dtype == want.dtype and np.array_equal(got, want)
    device.zero(held)
    assert not np.any(device.read(held))


def test_no_state_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(SMALL, has_initial_state=False, has_final_state=False)
    config = replace(config, conv_state_width=0, has_conv_state=False, has_present_conv_state=False)
    inputs = draw(config, 1, 4)
    made = runner(kda_session(config, inputs), FakeDevice(), monkeypatch)
    assert made.states == {}
    want = reference(config, inputs)["o"]
    for _ in range(6):
        assert relative_error(made.run(inputs)["o"], want) <= tolerance("body", "float32")
    assert made.captured


def test_sessions_print_no_warnings(library: str, capfd: pytest.CaptureFixture[str]) -> None:
    """ONNX Runtime warns of every node that the plugin leaves to the CPU EP; options of one's own bring that back."""
    model = call_model(SMALL, draw(SMALL, 1, 1))
    model.graph.node.append(helper.make_node("Relu", ["o"], ["relu_o"]))
    model.graph.output.append(helper.make_tensor_value_info("relu_o", TensorProto.FLOAT, None))
    for options, said in ((None, False), (ort.SessionOptions(), True)):
        deltafuse.session(model, "cpu", sess_options=options)
        assert ("not assigned to the preferred" in capfd.readouterr().err) is said
    deltafuse.capture(model, device="cpu")
    assert capfd.readouterr().err == ""
