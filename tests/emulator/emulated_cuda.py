"""Makes torch's "cuda" mean the emulator: ``pytest -p emulator.emulated_cuda``, or an import before the tests' runners.

Every tensor that is made from then on is a CPU tensor in memory that the emulator knows, with guard zones around it, so
that any of them may be handed to a kernel. Work is done before a call returns.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from . import build

_emulator = ctypes.CDLL(str(build.emulator()), mode=ctypes.RTLD_GLOBAL)
_emulator.emulator_malloc.restype = ctypes.c_void_p
_emulator.emulator_malloc.argtypes = [ctypes.c_size_t]
_emulator.emulator_free.argtypes = [ctypes.c_void_p]
_emulator.emulator_end_capture.restype = ctypes.c_void_p
_emulator.emulator_replay.argtypes = [ctypes.c_void_p]
_emulator.emulator_free_graph.argtypes = [ctypes.c_void_p]


@functools.cache
def _buffer_type(size: int) -> Any:
    """Arrays of so many bytes that give their memory back when the last tensor on them is gone."""

    def free(self: Any) -> None:
        _emulator.emulator_free(ctypes.addressof(self))

    return type("Memory", (ctypes.Array,), {"_type_": ctypes.c_uint8, "_length_": size, "__del__": free})


def on_device(x: torch.Tensor) -> torch.Tensor:
    """A copy in the emulator's memory; dense, in the order of the dimensions."""
    size = x.numel() * x.element_size()
    if size == 0:
        return _clone(x)
    memory = _buffer_type(size).from_address(_emulator.emulator_malloc(size))
    copy = torch.frombuffer(memory, dtype=torch.uint8, count=size).view(x.dtype).view(x.shape)
    copy.copy_(x)
    return copy


_clone = torch.Tensor.clone
_contiguous = torch.Tensor.contiguous
_to = torch.Tensor.to


def _host(device: Any) -> Any:
    return "cpu" if isinstance(device, str | torch.device) and str(device).startswith("cuda") else device


def _factory(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(function)
    def made(*args: Any, **kwargs: Any) -> torch.Tensor:
        if "device" in kwargs:
            kwargs["device"] = _host(kwargs["device"])
        return on_device(function(*args, **kwargs))

    return made


def _convert(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    if "device" in kwargs:
        kwargs["device"] = _host(kwargs["device"])
    return on_device(_to(self, *[_host(x) for x in args], **kwargs))


def _made_contiguous(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return self if self.is_contiguous() else on_device(_contiguous(self, *args, **kwargs))


class Stream:
    cuda_stream = 0

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait_stream(self, _: Stream) -> None: ...

    def synchronize(self) -> None: ...


class CUDAGraph:
    """What is launched while it captures is kept, and done at each replay."""

    def __init__(self) -> None:
        self._graph: int | None = None

    def begin(self) -> None:
        _emulator.emulator_begin_capture()

    def end(self) -> None:
        self._graph = _emulator.emulator_end_capture()

    def replay(self) -> None:
        status = _emulator.emulator_replay(self._graph)
        if status:
            raise RuntimeError(f"the graph failed with status {status}")

    def __del__(self) -> None:
        if self._graph is not None:
            _emulator.emulator_free_graph(self._graph)


@contextlib.contextmanager
def _capture(graph: CUDAGraph, *_: Any, **__: Any) -> Iterator[None]:
    graph.begin()
    try:
        yield
    finally:
        graph.end()


def _install() -> None:
    for name in (
        "full",
        "zeros",
        "ones",
        "empty",
        "tensor",
        "arange",
        "randn",
        "rand",
        "full_like",
        "zeros_like",
        "empty_like",
    ):
        setattr(torch, name, _factory(getattr(torch, name)))
    tensor: Any = torch.Tensor
    tensor.to = _convert
    tensor.cuda = lambda self, *_, **__: on_device(self)
    tensor.cpu = lambda self, *_, **__: on_device(self)
    tensor.clone = lambda self, *_, **__: on_device(self)
    tensor.pin_memory = lambda self, *_: on_device(self)
    tensor.contiguous = _made_contiguous
    cuda: Any = torch.cuda
    cuda.is_available = lambda: True
    cuda.device_count = lambda: 1
    cuda.current_device = lambda: 0
    cuda.get_device_capability = lambda *_: (9, 0)
    cuda.get_device_name = lambda *_: "emulated"
    cuda.synchronize = lambda *_: None
    cuda.Stream = Stream
    cuda.current_stream = lambda *_: Stream()
    cuda.default_stream = lambda *_: Stream()
    cuda.stream = lambda _: contextlib.nullcontext()
    cuda.CUDAGraph = CUDAGraph
    cuda.graph = _capture


_install()
