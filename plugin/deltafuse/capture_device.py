"""The memory that a runner's operands lie in, and who copies: the host, ONNX Runtime's CUDA, or CUDA on our stream."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from .capture_cuda import CudaApi, CudaError
from .errors import OptionError

Array = NDArray[Any]

#: Queued copies from the host after which they are waited for.
PENDING_COPIES = 64

FLOAT8 = 17  # e4m3fn
_ELEMENTS = {
    "tensor(float)": 1,
    "tensor(uint8)": 2,
    "tensor(int8)": 3,
    "tensor(uint16)": 4,
    "tensor(int16)": 5,
    "tensor(int32)": 6,
    "tensor(int64)": 7,
    "tensor(bool)": 9,
    "tensor(float16)": 10,
    "tensor(double)": 11,
    "tensor(uint32)": 12,
    "tensor(uint64)": 13,
    "tensor(bfloat16)": 16,
    "tensor(float8e4m3fn)": FLOAT8,
}


def element_type(name: str, kind: str) -> int:
    """ONNX's number for ORT's name of a tensor type.

    Raises:
        OptionError: not a tensor of numbers.
    """
    if kind not in _ELEMENTS:
        raise OptionError(f"{name} is a {kind}: a runner takes tensors of numbers")
    return _ELEMENTS[kind]


@functools.cache
def numpy_type(element: int) -> Any:
    """NumPy's type for ONNX's number, bfloat16 as ``ml_dtypes.bfloat16``."""
    from onnx import helper

    return np.dtype(helper.tensor_dtype_to_np_dtype(element))


def as_array(name: str, given: Any, element: int) -> Array:
    """What was given for an input or a state, as an array of its type.

    Lists and numbers have no type of their own: they may take the input's, if their values do.

    Raises:
        OptionError: an array of another type, or values that would become others.
    """
    wanted = np.dtype(numpy_type(element))
    try:
        array = np.asarray(given)
    except ValueError as error:  # rows of different lengths
        raise OptionError(f"{name}: {error}") from error
    if array.dtype != wanted:
        if isinstance(given, np.ndarray) or not _holds(wanted, array):
            raise OptionError(f"{name} is a {array.dtype}: expected {wanted}")
        array = array.astype(wanted)
    return np.ascontiguousarray(array).reshape(array.shape)


def _holds(wanted: np.dtype[Any], array: Array) -> bool:
    """Can values of a list be of this type without being others? Floats may be rounded."""
    if array.size and array.dtype.kind not in "biuf":
        return False
    if wanted.kind not in "iub":
        return True
    return array.size == 0 or (array.dtype.kind != "f" and bool((array.astype(wanted) == array).all()))


class Graph(Protocol):
    """A captured step."""

    def launch(self) -> None: ...

    def close(self) -> None: ...


class HostDevice:
    """Host memory: sessions on the CPU. Runs are eager."""

    name = "cpu"
    index = 0
    #: Whether runs need not wait for the device (the runner's own copies are ordered behind them).
    asynchronous = False

    def __init__(self, refusal: str = "the session is on the CPU") -> None:
        #: Why steps cannot be captured here, "" where they can.
        self.refusal = refusal

    def empty(self, shape: Sequence[int], element: int) -> Any:
        """An ``OrtValue`` of this device; what is in it is not defined."""
        import onnxruntime as ort

        return ort.OrtValue.ortvalue_from_shape_and_type(list(shape), element, self.name, self.index)

    def write(self, value: Any, source: Array) -> None:
        """Copy an array of the value's type and shape into it."""
        source = np.ascontiguousarray(source)
        if source.nbytes:
            ctypes.memmove(value.data_ptr(), source.ctypes.data, source.nbytes)

    def read(self, value: Any) -> Array:
        """A copy of the value."""
        out = np.empty(tuple(value.shape()), numpy_type(value.element_type()))
        if out.nbytes:
            ctypes.memmove(out.ctypes.data, value.data_ptr(), out.nbytes)
        return out

    def copy(self, target: Any, source: Any) -> None:
        """Copy a value of this device into another of the same size."""
        size = target.tensor_size_in_bytes()
        if size:
            ctypes.memmove(target.data_ptr(), source.data_ptr(), size)

    def zero(self, value: Any) -> None:
        size = value.tensor_size_in_bytes()
        if size:
            ctypes.memset(value.data_ptr(), 0, size)

    def synchronize(self) -> None:
        """Wait for what was queued."""

    def settle(self) -> None:
        """Wait for what others may have queued, before memory of theirs is read."""

    def capture(self, work: Callable[[], None]) -> Graph:
        """What ``work`` queues, without running it."""
        raise CudaError(self.refusal)

    def close(self) -> None:
        """Give back what belongs to the device."""


class OrtCudaDevice(HostDevice):
    """A GPU without cuda-python, or with a session that has no stream of ours: ONNX Runtime copies. Runs are eager."""

    name = "cuda"

    def __init__(self, index: int, refusal: str) -> None:
        super().__init__(refusal)
        self.index = index

    def write(self, value: Any, source: Array) -> None:
        if source.nbytes:
            source = np.ascontiguousarray(source)
            # ONNX Runtime takes float8 as bytes
            value.update_inplace(source.view(np.uint8) if value.element_type() == FLOAT8 else source)

    def read(self, value: Any) -> Array:
        found = np.array(value.numpy())
        return found.view(numpy_type(FLOAT8)) if value.element_type() == FLOAT8 else found

    def copy(self, target: Any, source: Any) -> None:
        self.write(target, self.read(source))

    def zero(self, value: Any) -> None:
        self.write(value, np.zeros(tuple(value.shape()), numpy_type(value.element_type())))


class CudaDevice(HostDevice):
    """A GPU on a stream that the session uses too: all copies are queued there, and steps can be captured."""

    name = "cuda"
    asynchronous = True

    def __init__(self, api: CudaApi, stream: int, *, owned: bool = False) -> None:
        super().__init__("")
        self.api, self.stream, self.index, self._owned = api, stream, api.index, owned
        #: Host memory that queued copies may still read.
        self._pending: list[Array] = []

    def write(self, value: Any, source: Array) -> None:
        """Queue the copy of an array; the caller may change the array at once."""
        if not source.nbytes:
            return
        if len(self._pending) >= PENDING_COPIES:
            self.synchronize()
        own = np.array(source, order="C")
        self._pending.append(own)
        self.api.upload(value.data_ptr(), own.ctypes.data, own.nbytes, self.stream)

    def read(self, value: Any) -> Array:
        out = np.empty(tuple(value.shape()), numpy_type(value.element_type()))
        if out.nbytes:
            self.api.download(out.ctypes.data, value.data_ptr(), out.nbytes, self.stream)
        self.synchronize()
        return out

    def copy(self, target: Any, source: Any) -> None:
        size = target.tensor_size_in_bytes()
        if size:
            self.api.copy(target.data_ptr(), source.data_ptr(), size, self.stream)

    def zero(self, value: Any) -> None:
        size = value.tensor_size_in_bytes()
        if size:
            self.api.zero(value.data_ptr(), size, self.stream)

    def synchronize(self) -> None:
        self.api.synchronize(self.stream)
        self._pending.clear()

    def settle(self) -> None:
        self.api.synchronize_all()

    def capture(self, work: Callable[[], None]) -> Graph:
        self.synchronize()
        graph = self.api.capture(self.stream, work)
        try:
            found = self.api.host_work(graph)
            if found:
                more = f" and {len(found) - 3} more" if len(found) > 3 else ""
                raise CudaError(
                    f"the step has {', '.join(found[:3])}{more}, which a replay would repeat as it was then"
                )
            executable = self.api.instantiate(graph)
        finally:
            self.api.destroy_graph(graph)
        return _CudaGraph(self, executable)

    def close(self) -> None:
        self.synchronize()
        if self._owned:
            self._owned = False
            self.api.spare_stream(self.stream)


class _CudaGraph:
    def __init__(self, device: CudaDevice, executable: Any) -> None:
        self._device, self._executable = device, executable

    def launch(self) -> None:
        self._device.api.launch(self._executable, self._device.stream)

    def close(self) -> None:
        if self._executable is not None:
            self._device.api.destroy_executable(self._executable)
            self._executable = None
