"""Sessions and stand-ins for the tests of deltafuse.capture."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from typing import Any

import deltafuse
import onnxruntime as ort
import pytest
from deltafuse.capture_cuda import CudaError
from deltafuse.capture_device import CudaDevice, HostDevice
from onnx import parser

from .call import Arrays, call_model, quiet

#: The modules under test (the name deltafuse.capture is a function).
module: Any = sys.modules[deltafuse.capture.__module__]


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

    def __init__(self, problem: str = "") -> None:
        super().__init__("")
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
