"""CUDA's driver API as the runner needs it, through cuda-python (``pip install cuda-bindings``).

Everything that touches the driver is here, so that tests can put another object in its place.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from .errors import DeltaFuseError

#: Streams that close() gave back, by device: a session may outlive its runner, so they are used again, not destroyed.
_spare_streams: dict[int, list[int]] = {}


class CudaError(DeltaFuseError):
    """The CUDA driver refused a call, or cuda-python or a driver is missing."""


class CudaApi:
    """One CUDA device, by its ordinal. All pointers and streams are plain numbers."""

    def __init__(self, index: int = 0) -> None:
        """Raises CudaError: no cuda-python, no driver, no such device."""
        try:
            from cuda.bindings import driver
        except ImportError as error:
            raise CudaError(f"cuda-python is not installed ({error}): pip install cuda-bindings") from error
        self._driver = driver
        self.index = index
        try:
            self._call("cuInit", 0)
            device = self._call("cuDeviceGet", index)
            self._context = self._call("cuDevicePrimaryCtxRetain", device)
        except CudaError:
            raise
        except Exception as error:  # the bindings raise RuntimeError where libcuda is not there
            raise CudaError(f"there is no CUDA driver here: {error}") from error

    def _call(self, name: str, *arguments: Any) -> Any:
        code, *values = getattr(self._driver, name)(*arguments)
        if int(code) != 0:
            raise CudaError(f"{name}: {getattr(code, 'name', code)}")
        return values[0] if len(values) == 1 else values

    @contextmanager
    def _current(self) -> Iterator[None]:
        """The device's context current in this thread, and afterwards what was current before."""
        self._call("cuCtxPushCurrent", self._context)
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent")

    def make_stream(self) -> int:
        """A stream of this device that does not wait for the default stream."""
        if _spare_streams.get(self.index):
            return _spare_streams[self.index].pop()
        with self._current():
            return int(self._call("cuStreamCreate", int(self._driver.CUstream_flags.CU_STREAM_NON_BLOCKING)))

    def spare_stream(self, stream: int) -> None:
        """Give back a stream of :meth:`make_stream`."""
        _spare_streams.setdefault(self.index, []).append(stream)

    def synchronize(self, stream: int) -> None:
        with self._current():
            self._call("cuStreamSynchronize", stream)

    def synchronize_all(self) -> None:
        """Wait for everything on the device."""
        with self._current():
            self._call("cuCtxSynchronize")

    def upload(self, target: int, source: int, size: int, stream: int) -> None:
        """Host to device, queued: the host memory must stay as it is until :meth:`synchronize`."""
        with self._current():
            self._call("cuMemcpyHtoDAsync", target, source, size, stream)

    def download(self, target: int, source: int, size: int, stream: int) -> None:
        """Device to host."""
        with self._current():
            self._call("cuMemcpyDtoHAsync", target, source, size, stream)

    def copy(self, target: int, source: int, size: int, stream: int) -> None:
        """Device to device."""
        with self._current():
            self._call("cuMemcpyDtoDAsync", target, source, size, stream)

    def zero(self, target: int, size: int, stream: int) -> None:
        with self._current():
            self._call("cuMemsetD8Async", target, 0, size, stream)

    def capture(self, stream: int, work: Callable[[], None]) -> Any:
        """What ``work`` queues on the stream, as a graph; nothing of it runs.

        Thread-local mode: a call that cannot be captured (a synchronisation, an allocation) made by this thread ends
        the capture with an error instead of being left out of the graph, and other threads are not disturbed.
        """
        mode = self._driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        with self._current():
            self._call("cuStreamBeginCapture", stream, mode)
            try:
                work()
                graph = self._call("cuStreamEndCapture", stream)
            except BaseException:
                # The stream must leave capture in any case; where it has left, this is one more refused call.
                code, *values = self._driver.cuStreamEndCapture(stream)
                if int(code) == 0 and values:
                    self._driver.cuGraphDestroy(values[0])
                _forget_runtime_errors()
                raise
            _, count = self._call("cuGraphGetNodes", graph, 0)
            if not int(count):  # replaying it would leave the old outputs there
                self._call("cuGraphDestroy", graph)
                raise CudaError("the step queued nothing on the session's stream: its CUDA EP works on another one")
            return graph

    def host_work(self, graph: Any) -> list[str]:
        """What the graph does with host memory or on the host: it would be repeated with what lay there at capture."""
        with self._current():
            return list(self._host_work(graph))

    def _host_work(self, graph: Any) -> Iterator[str]:
        kinds = self._driver.CUgraphNodeType
        _, count = self._call("cuGraphGetNodes", graph, 0)
        nodes, _ = self._call("cuGraphGetNodes", graph, count)
        for node in nodes[: int(count)]:
            kind = self._call("cuGraphNodeGetType", node)
            if kind == kinds.CU_GRAPH_NODE_TYPE_HOST:
                yield "a call on the host"
            elif kind == kinds.CU_GRAPH_NODE_TYPE_GRAPH:
                yield from self._host_work(self._call("cuGraphChildGraphNodeGetGraph", node))
            elif kind == kinds.CU_GRAPH_NODE_TYPE_MEMCPY:
                copied = self._call("cuGraphMemcpyNodeGetParams", node)
                size = int(copied.WidthInBytes) * max(int(copied.Height), 1) * max(int(copied.Depth), 1)
                if self._on_host(copied.srcMemoryType, copied.srcDevice):
                    yield f"a copy of {size} bytes from the host"
                if self._on_host(copied.dstMemoryType, copied.dstDevice):
                    yield f"a copy of {size} bytes to the host"

    def _on_host(self, kind: Any, pointer: Any) -> bool:
        kinds = self._driver.CUmemorytype
        if kind != kinds.CU_MEMORYTYPE_UNIFIED:
            return bool(kind == kinds.CU_MEMORYTYPE_HOST)
        attribute = self._driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE
        code, *values = self._driver.cuPointerGetAttribute(attribute, pointer)
        # Pageable host memory is unknown to the driver.
        return int(code) != 0 or int(values[0]) == int(kinds.CU_MEMORYTYPE_HOST)

    def instantiate(self, graph: Any) -> Any:
        """The graph made ready for :meth:`launch`. Afterwards the graph itself may be destroyed."""
        with self._current():
            return self._call("cuGraphInstantiate", graph, 0)

    def launch(self, executable: Any, stream: int) -> None:
        with self._current():
            self._call("cuGraphLaunch", executable, stream)

    def destroy_graph(self, graph: Any) -> None:
        with self._current():
            self._call("cuGraphDestroy", graph)

    def destroy_executable(self, executable: Any) -> None:
        with self._current():
            self._call("cuGraphExecDestroy", executable)


def _forget_runtime_errors() -> None:
    """Clear the last error of the CUDA runtimes in this process.

    A call that was refused during a capture stays there as this thread's last error, and ONNX Runtime would take it for
    one of its next kernel's.
    """
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
            paths = {line.split(maxsplit=5)[-1].strip() for line in maps if "libcudart" in line}
    except OSError:
        return
    for path in paths:
        try:
            ctypes.CDLL(path).cudaGetLastError()
        except (OSError, AttributeError):
            continue
