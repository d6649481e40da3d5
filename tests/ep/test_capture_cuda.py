"""The CUDA side of deltafuse.capture, with stand-ins for cuda-python and for the driver."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import deltafuse
import numpy as np
import pytest
from deltafuse import capture_cuda, capture_session
from deltafuse.capture_cuda import CudaApi, CudaError
from deltafuse.capture_device import CudaDevice, HostDevice, OrtCudaDevice
from deltafuse.cuda_ep import CudaEp

from .capture_kit import FakeApi, HostMemoryCuda, counter, runner


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


def cuda_session(options: dict[str, str], name: str = "CUDAExecutionProvider") -> Any:
    place = types.SimpleNamespace(name="Cuda", device_id=3)
    return types.SimpleNamespace(
        get_providers=lambda: [name],
        get_provider_options=lambda: {name: options},
        get_input_memory_infos=lambda: [types.SimpleNamespace(name="Cpu", device_id=0), place],
        get_output_memory_infos=lambda: [],
    )


def test_device_of_a_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture_session, "CudaApi", FakeApi)
    assert isinstance(capture_session.device_of(counter()), HostDevice)

    def no_memory(self: Any, shape: Any, element: int) -> Any:
        raise RuntimeError("use the CUDA package")

    monkeypatch.setattr(CudaDevice, "empty", no_memory)
    found = capture_session.device_of(cuda_session({"user_compute_stream": "77"}, "CudaPluginExecutionProvider"))
    assert found.name == "cpu" and "no memory of cuda:3 to the runner: use the CUDA package" in found.refusal
    for kind in (CudaDevice, OrtCudaDevice):
        monkeypatch.setattr(kind, "empty", lambda self, shape, element: None)
    found = capture_session.device_of(cuda_session({"device_id": "1", "user_compute_stream": "77"}))
    assert isinstance(found, CudaDevice) and (found.index, found.stream, found.refusal) == (1, 77, "")
    for options, reason in (
        ({"device_id": "0"}, "no user_compute_stream"),
        ({"device_id": "0", "user_compute_stream": "0"}, "no user_compute_stream"),
        ({"device_id": "0", "user_compute_stream": "1"}, "the default stream, which CUDA cannot capture"),
    ):
        found = capture_session.device_of(cuda_session(options))
        assert isinstance(found, OrtCudaDevice) and reason in found.refusal and found.name == "cuda"

    def missing(index: int) -> Any:
        raise CudaError("cuda-python is not installed")

    monkeypatch.setattr(capture_session, "CudaApi", missing)
    found = capture_session.device_of(cuda_session({"device_id": "2", "user_compute_stream": "77"}))
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

    monkeypatch.setattr(capture_session, "CudaApi", Api)
    monkeypatch.setattr(session_module, "session", session)
    monkeypatch.setattr(capture_session.cuda_ep, "find", lambda ort: CudaEp("classic"))
    _, place = capture_session.make_session(b"", "cuda:1", "auto", None, {"CUDAExecutionProvider": {"a": "b"}}, False)
    assert given["provider_options"] == {"CUDAExecutionProvider": {"a": "b", "user_compute_stream": 99}}
    if ends_on.startswith("CUDA"):
        assert isinstance(place, CudaDevice) and (place.index, place.stream) == (1, 99) and not spared
        place.close()
    else:
        assert isinstance(place, HostDevice) and place.name == "cpu"
    assert spared == [99]


@pytest.mark.parametrize(
    ("chosen", "reason"),
    [
        (CudaEp("none", reason="there is no CUDA EP"), "there is no CUDA EP"),
        (CudaEp("plugin", "/x/cuda.so"), "ORT_CUDA_PLUGIN_EP_PATH is /x/cuda.so: there is no such file"),
    ],
)
def test_no_stream_is_made_where_no_cuda_ep_takes_it(
    chosen: CudaEp, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    session_module: Any = sys.modules[deltafuse.session.__module__]
    given: dict[str, Any] = {}

    def session(model: Any, device: str, **how: Any) -> Any:
        given.update(how)
        return cuda_session({"a": "b"})

    monkeypatch.setattr(capture_session.cuda_ep, "find", lambda ort: chosen)
    monkeypatch.setattr(capture_session, "CudaApi", lambda index: pytest.fail("a stream was made"))
    monkeypatch.setattr(session_module, "session", session)
    monkeypatch.setattr(OrtCudaDevice, "empty", lambda self, shape, element: None)
    _, place = capture_session.make_session(b"", "cuda", "auto", None, None, False)
    assert given["provider_options"] == {} and place.refusal == reason and place.index == 3


def test_steps_of_another_makers_cuda_ep_are_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture_session.cuda_ep, "of_session", lambda ort, names: "another_ep")
    monkeypatch.setattr(OrtCudaDevice, "empty", lambda self, shape, element: None)
    found = capture_session.device_of(cuda_session({"user_compute_stream": "77"}, "another_ep"))
    assert isinstance(found, OrtCudaDevice) and "may work on another stream" in found.refusal


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


def test_a_step_that_is_on_another_stream(bindings: FakeBindings) -> None:
    """An empty graph: replaying it would leave the outputs of the step before."""
    with pytest.raises(CudaError, match="the step queued nothing on the session's stream"):
        CudaApi(0).capture(7, lambda: None)
    assert bindings.calls[-2:] == ["cuGraphDestroy", "cuCtxPopCurrent"]


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
