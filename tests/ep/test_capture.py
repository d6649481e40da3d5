"""deltafuse.capture: states, shapes, warm-up, capture and replay, with a CPU session and stand-ins for CUDA."""

from __future__ import annotations

import ctypes
import sys
import threading
import types
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import deltafuse
import ml_dtypes
import numpy as np
import onnxruntime as ort
import pytest
from deltafuse import capture_cuda
from deltafuse.capture_cuda import CudaApi, CudaError
from deltafuse.capture_device import CudaDevice, HostDevice, OrtCudaDevice
from deltafuse.capture_states import first_shape
from deltafuse.custom_ops.kda.reference import reference, relative_error, tolerance
from deltafuse.errors import DeltaFuseError, OptionError
from onnx import TensorProto, helper, parser

from .call import SMALL, Arrays, call_model, draw, quiet

module: Any = sys.modules[deltafuse.capture.__module__]
STATES = {"conv_state": "present_conv_state", "initial_state": "final_state"}


def kda_session(config: Any, inputs: Arrays) -> ort.InferenceSession:
    return ort.InferenceSession(call_model(config, inputs).SerializeToString(), quiet())


def counter(text: str = "") -> ort.InferenceSession:
    """``y = x + s``, ``new_s = s + sum(x)`` over [B, T, 2]; with ``text`` other nodes in its place."""
    body = (
        text
        or """
        total = ReduceSum <keepdims=1> (x, axis)
        new_s = Add (s, total)
        y = Add (x, s)
    """
    )
    model = parser.parse_model(
        f"""
        <ir_version: 8, opset_import: ["" : 20]>
        g (float[B, T, 2] x, float[B, 1, 2] s) => (float[B, T, 2] y, float[B, 1, 2] new_s)
        <int64[1] axis = {{1}}> {{ {body} }}
        """
    )
    return ort.InferenceSession(model.SerializeToString(), quiet(), providers=["CPUExecutionProvider"])


def growing() -> ort.InferenceSession:
    """A cache that grows by the step's tokens, and a state that does not."""
    model = parser.parse_model(
        """
        <ir_version: 8, opset_import: ["" : 20]>
        g (float[B, T, 2] x, float[B, past, 2] past_0_key, float[B, 1, 2] past_0_state)
          => (float[B, 1, 2] y, float[B, total, 2] present_0_key, float[B, 1, 2] present_0_state)
        <int64[1] axis = {1}> {
          present_0_key = Concat <axis=1> (past_0_key, x)
          y = ReduceSum <keepdims=1> (present_0_key, axis)
          present_0_state = Add (past_0_state, y)
        }
        """
    )
    return ort.InferenceSession(model.SerializeToString(), quiet(), providers=["CPUExecutionProvider"])


class FakeGraph:
    def __init__(self, device: FakeDevice, work: Callable[[], None]) -> None:
        self.device, self.work, self.closed = device, work, False

    def launch(self) -> None:
        assert not self.closed
        self.device.events.append("launch")
        self.work()

    def close(self) -> None:
        self.closed = True
        self.device.events.append("close")


class FakeDevice(HostDevice):
    """The host, with steps that can be captured: as on a GPU, capturing runs nothing."""

    refusal = ""

    def __init__(self, problem: str = "") -> None:
        self.events: list[str] = []
        self.problem = problem
        self.graphs: list[FakeGraph] = []

    def capture(self, work: Callable[[], None]) -> FakeGraph:
        self.events.append("capture")
        if self.problem:
            raise CudaError(self.problem)
        self.graphs.append(FakeGraph(self, work))
        return self.graphs[-1]


def runner(session: ort.InferenceSession, device: HostDevice, monkeypatch: pytest.MonkeyPatch, **how: Any) -> Any:
    monkeypatch.setattr(module, "device_of", lambda session: device)
    return deltafuse.capture(session, **how)


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
        ({"x": np.ones((1, 1, 2))}, "x is a float64: expected float32"),
    ],
)
def test_feeds_that_do_not_fit(feeds: Any, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = runner(counter(), FakeDevice(), monkeypatch)
    with pytest.raises(OptionError, match=message):
        made.run(feeds)


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
    with pytest.raises(OptionError, match="z: no state, the states are s"):
        made.reset({"z": np.ones(1, np.float32)})
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


# -- CUDA, with stand-ins for cuda-python and for the driver ----------------------------------------------------------


class FakeApi:
    """:class:`CudaApi` over host memory: a stream is a list of what was queued, done when it is waited for."""

    def __init__(self, index: int = 0, host: list[str] | None = None) -> None:
        self.index, self.queue, self.draining = index, list[Callable[[], None]](), False
        self.found = host or []
        self.log: list[str] = []

    def _add(self, what: str, work: Callable[[], Any]) -> None:
        self.log.append(what)
        self.queue.append(work)

    def upload(self, target: int, source: int, size: int, stream: int) -> None:
        self._add("upload", lambda: ctypes.memmove(target, source, size))

    download = copy = upload

    def zero(self, target: int, size: int, stream: int) -> None:
        self._add("zero", lambda: ctypes.memset(target, 0, size))

    def synchronize(self, stream: int = 0) -> None:
        if self.draining:  # a replay runs the session, and what is queued behind it must wait
            return
        self.draining = True
        while self.queue:
            self.queue.pop(0)()
        self.draining = False

    synchronize_all = synchronize

    def capture(self, stream: int, work: Callable[[], None]) -> Any:
        self.log.append("capture")
        return work

    def host_work(self, graph: Any) -> list[str]:
        return self.found

    def instantiate(self, graph: Any) -> Any:
        return graph

    def launch(self, executable: Any, stream: int) -> None:
        self._add("launch", executable)

    def destroy_graph(self, graph: Any) -> None:
        self.log.append("destroy graph")

    def destroy_executable(self, executable: Any) -> None:
        self.log.append("destroy executable")

    def spare_stream(self, stream: int) -> None:
        self.log.append(f"spare {stream}")


class HostMemoryCuda(CudaDevice):
    """:class:`CudaDevice` whose memory is the host's. ORT runs at once, so what was queued is done before."""

    name = "cpu"

    def __init__(self, api: Any) -> None:
        super().__init__(api, 5, owned=True)
        self.index = 0


@pytest.fixture
def queued(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A runner over :class:`HostMemoryCuda`, and its API."""

    def make(host: list[str] | None = None, **how: Any) -> Any:
        api = FakeApi(host=host)
        session = counter()
        real = session.run_with_iobinding

        def ordered(*given: Any) -> None:
            api.synchronize()
            real(*given)

        monkeypatch.setattr(session, "run_with_iobinding", ordered)
        return runner(session, HostMemoryCuda(api), monkeypatch, **how), api

    return make


def test_copies_are_queued_in_order(queued: Any) -> None:
    made, api = queued()
    total = np.zeros((1, 1, 2), np.float32)
    for i in range(8):
        x = np.full((1, 1, 2), i, np.float32)
        np.testing.assert_array_equal(made(x=x)["y"], x + total)
        total += x
    np.testing.assert_array_equal(made.state_arrays()["s"], total)
    assert api.log.count("launch") == 5 and api.log.count("capture") == 2 and len(made.captured) == 1
    made.close()
    assert api.log.count("destroy graph") == 2 == api.log.count("destroy executable") and api.log[-1] == "spare 5"


def test_graphs_with_host_memory_are_refused(queued: Any) -> None:
    made, api = queued(host=["a copy of 8 bytes from the host"])
    x = np.ones((1, 1, 2), np.float32)
    assert not made.prepare({"x": x})
    assert "a copy of 8 bytes from the host, which a replay would repeat" in next(iter(made.not_captured.values()))
    np.testing.assert_array_equal(made(x=x)["y"], x)
    assert "launch" not in api.log and api.log.count("destroy graph") == 1


def cuda_session(options: dict[str, str]) -> Any:
    return types.SimpleNamespace(
        get_providers=lambda: ["CUDAExecutionProvider"],
        get_provider_options=lambda: {"CUDAExecutionProvider": options},
    )


def test_device_of_a_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CudaApi", FakeApi)
    assert isinstance(module.device_of(counter()), HostDevice)
    found = module.device_of(cuda_session({"device_id": "1", "user_compute_stream": "77"}))
    assert isinstance(found, CudaDevice) and (found.index, found.stream, found.refusal) == (1, 77, "")
    for options, reason in (
        ({"device_id": "0"}, "no user_compute_stream"),
        ({"device_id": "0", "user_compute_stream": "0"}, "no user_compute_stream"),
        ({"device_id": "0", "user_compute_stream": "1"}, "the default stream, which CUDA cannot capture"),
    ):
        found = module.device_of(cuda_session(options))
        assert isinstance(found, OrtCudaDevice) and reason in found.refusal and found.name == "cuda"

    def missing(index: int) -> Any:
        raise CudaError("cuda-python is not installed")

    monkeypatch.setattr(module, "CudaApi", missing)
    found = module.device_of(cuda_session({"device_id": "2", "user_compute_stream": "77"}))
    assert isinstance(found, OrtCudaDevice) and found.index == 2 and "cuda-python is not installed" in found.refusal


@pytest.mark.parametrize("ends_on", ["CUDAExecutionProvider", "CPUExecutionProvider"])
def test_a_stream_is_made_for_a_path(ends_on: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spared: list[int] = []

    class Api(FakeApi):
        def make_stream(self) -> int:
            return 99

        def spare_stream(self, stream: int) -> None:
            spared.append(stream)

    given: dict[str, Any] = {}
    session_module: Any = sys.modules[deltafuse.session.__module__]

    def session(model: Any, device: str, **how: Any) -> Any:
        given.update(how, device=device)
        return types.SimpleNamespace(get_providers=lambda: [ends_on])

    monkeypatch.setattr(module, "CudaApi", Api)
    monkeypatch.setattr(session_module, "session", session)
    monkeypatch.setattr(ort, "get_available_providers", lambda: ["CUDAExecutionProvider"])
    _, place = module._make_session(b"", "cuda:1", "auto", None, {"CUDAExecutionProvider": {"a": "b"}}, False)
    assert given["provider_options"] == {"CUDAExecutionProvider": {"a": "b", "user_compute_stream": 99}}
    if ends_on.startswith("CUDA"):
        assert isinstance(place, CudaDevice) and (place.index, place.stream) == (1, 99) and not spared
        place.close()
    else:
        assert isinstance(place, HostDevice) and place.name == "cpu"
    assert spared == [99]


class Code(int):
    name = "CUDA_ERROR_X"


class FakeBindings:
    """cuda.bindings.driver: records calls; ``failing`` calls give an error, ``nodes`` is the captured graph."""

    class CUstream_flags:
        CU_STREAM_NON_BLOCKING = 1

    class CUstreamCaptureMode:
        CU_STREAM_CAPTURE_MODE_THREAD_LOCAL = 1

    class CUgraphNodeType:
        CU_GRAPH_NODE_TYPE_KERNEL, CU_GRAPH_NODE_TYPE_MEMCPY, CU_GRAPH_NODE_TYPE_HOST = 0, 1, 3
        CU_GRAPH_NODE_TYPE_GRAPH = 4

    class CUmemorytype:
        CU_MEMORYTYPE_HOST, CU_MEMORYTYPE_DEVICE, CU_MEMORYTYPE_UNIFIED = 1, 2, 4

    class CUpointer_attribute:
        CU_POINTER_ATTRIBUTE_MEMORY_TYPE = 2

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.failing: set[str] = set()
        self.nodes: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        results: dict[str, Callable[..., tuple[Any, ...]]] = {
            "cuGraphGetNodes": lambda graph, count: (0, graph[:count], len(graph)),
            "cuGraphNodeGetType": lambda node: (0, node["type"]),
            "cuGraphChildGraphNodeGetGraph": lambda node: (0, node["graph"]),
            "cuGraphMemcpyNodeGetParams": lambda node: (0, types.SimpleNamespace(**node["copy"])),
            "cuPointerGetAttribute": lambda attribute, pointer: (1, None) if pointer == 13 else (0, pointer),
            "cuStreamEndCapture": lambda stream: (0, self.nodes),
            "cuStreamCreate": lambda flags: (0, 4096),
        }

        def call(*arguments: Any) -> tuple[Any, ...]:
            self.calls.append(name)
            if name in self.failing:
                return (Code(900), None)
            if name in results:
                return results[name](*arguments)
            return (Code(0), "made") if "Create" in name or "Retain" in name or "Instantiate" in name else (Code(0),)

        return call


@pytest.fixture
def bindings(monkeypatch: pytest.MonkeyPatch) -> FakeBindings:
    fake = FakeBindings()
    package, inner = types.ModuleType("cuda"), types.ModuleType("cuda.bindings")
    inner.driver = fake  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cuda", package)
    monkeypatch.setitem(sys.modules, "cuda.bindings", inner)
    monkeypatch.setattr(capture_cuda, "_spare_streams", {})
    return fake


def memcpy(source: int, target: int, source_at: int = 2, target_at: int = 2) -> Any:
    sizes = {"WidthInBytes": 8, "Height": 1, "Depth": 1}
    places = {"srcMemoryType": source, "dstMemoryType": target, "srcDevice": source_at, "dstDevice": target_at}
    return {"type": 1, "copy": sizes | places}


def test_capture_through_the_bindings(bindings: FakeBindings) -> None:
    api = CudaApi(0)
    stream = api.make_stream()
    assert stream == 4096
    kernel = {"type": 0}
    bindings.nodes = [kernel, memcpy(2, 2), memcpy(4, 4)]
    device = CudaDevice(api, stream, owned=True)
    ran: list[int] = []
    graph = device.capture(lambda: ran.append(1))
    assert ran == [1]
    order = [name for name in bindings.calls if "Capture" in name or name in ("cuGraphInstantiate", "cuGraphDestroy")]
    assert order == ["cuStreamBeginCapture", "cuStreamEndCapture", "cuGraphInstantiate", "cuGraphDestroy"]
    graph.launch()
    graph.close()
    graph.close()
    assert bindings.calls.count("cuGraphLaunch") == 1 == bindings.calls.count("cuGraphExecDestroy")
    assert bindings.calls.count("cuCtxPushCurrent") == bindings.calls.count("cuCtxPopCurrent")
    device.close()
    assert api.make_stream() == 4096 and bindings.calls.count("cuStreamCreate") == 1, "a spare stream is used again"


@pytest.mark.parametrize(
    ("node", "what"),
    [
        ({"type": 3}, "a call on the host"),
        (memcpy(1, 2), "a copy of 8 bytes from the host"),
        (memcpy(2, 1), "a copy of 8 bytes to the host"),
        (memcpy(4, 2, source_at=1), "a copy of 8 bytes from the host"),
        (memcpy(4, 4, target_at=13), "a copy of 8 bytes to the host"),
        ({"type": 4, "graph": [memcpy(1, 2)]}, "a copy of 8 bytes from the host"),
    ],
)
def test_host_work_in_a_graph_is_found(node: Any, what: str, bindings: FakeBindings) -> None:
    bindings.nodes = [{"type": 0}, node]
    api = CudaApi(0)
    with pytest.raises(CudaError, match=f"the step has {what}, which"):
        CudaDevice(api, 7).capture(lambda: None)
    assert bindings.calls[-2:] == ["cuGraphDestroy", "cuCtxPopCurrent"] and "cuGraphInstantiate" not in bindings.calls


def test_a_capture_that_fails_ends(bindings: FakeBindings, monkeypatch: pytest.MonkeyPatch) -> None:
    api = CudaApi(0)

    def fails() -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(RuntimeError, match="not permitted"):
        api.capture(7, fails)
    assert bindings.calls[-3:] == ["cuStreamEndCapture", "cuGraphDestroy", "cuCtxPopCurrent"]
    forgotten: list[int] = []
    monkeypatch.setattr(capture_cuda, "_forget_runtime_errors", lambda: forgotten.append(1))
    bindings.failing.add("cuStreamEndCapture")
    with pytest.raises(RuntimeError, match="not permitted"):
        api.capture(7, fails)
    with pytest.raises(CudaError, match="cuStreamEndCapture: CUDA_ERROR_X"):
        api.capture(7, lambda: None)
    assert forgotten == [1, 1]


def test_no_cuda_python_and_no_driver(bindings: FakeBindings, monkeypatch: pytest.MonkeyPatch) -> None:
    bindings.failing.add("cuDeviceGet")
    with pytest.raises(CudaError, match="cuDeviceGet: CUDA_ERROR_X"):
        CudaApi(3)

    def no_library(flags: int) -> Any:
        raise RuntimeError("Failed to dlopen libcuda.so.1")

    bindings.cuInit = no_library  # type: ignore[attr-defined]
    with pytest.raises(CudaError, match="there is no CUDA driver here"):
        CudaApi(0)
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(CudaError, match="pip install cuda-bindings"):
        CudaApi(0)


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
