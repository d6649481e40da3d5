"""A caller's CUDA stream: which device it is on, and how ONNX Runtime is told to use it.

The driver library is loaded when a stream is given, not before; nothing here needs a CUDA package.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Mapping
from typing import Any

from .errors import OptionError, OrtError

STREAM_OPTION = "user_compute_stream"
#: The driver's handles for the default stream, in its two forms. They belong to whichever device is current.
LEGACY_DEFAULT_STREAM = 1
PER_THREAD_DEFAULT_STREAM = 2


def checked_stream(
    options: Mapping[str, str], index: int, stream_device: Callable[[int], int] | None = None
) -> dict[str, str]:
    """The CUDA EP's options with ``user_compute_stream`` checked against the session's device.

    Args:
        options: the options, all text. ``user_compute_stream`` is the stream's address as a number; 0 is the default
            stream, for which ONNX Runtime has no option (0 means "none given"): it gets the driver's handle for it.
        index: the session's CUDA device.
        stream_device: what tells the CUDA device of a stream, for tests.

    Raises:
        OptionError: not a number, or a stream of another device.
    """
    checked = dict(options)
    if STREAM_OPTION not in checked:
        return checked
    given = checked[STREAM_OPTION]
    try:
        stream = int(given, 0)
    except ValueError:
        stream = -1
    if stream < 0:
        raise OptionError(
            f"{STREAM_OPTION} {given!r}: expected the stream's address as a number, 0 for the default stream"
        )
    if stream in (0, LEGACY_DEFAULT_STREAM, PER_THREAD_DEFAULT_STREAM):
        checked[STREAM_OPTION] = str(stream or LEGACY_DEFAULT_STREAM)
        return checked
    device = (stream_device or device_of_stream)(stream)
    if device != index:
        raise OptionError(f"{STREAM_OPTION} is a stream of cuda:{device}: the session is on cuda:{index}")
    checked[STREAM_OPTION] = str(stream)
    return checked


def device_of_stream(stream: int) -> int:
    """The CUDA ordinal of the device that a stream belongs to.

    Raises:
        OrtError: there is no driver library, or it refuses the stream.
    """
    driver = _driver()
    context, device = ctypes.c_void_p(), ctypes.c_int()
    _check(driver, "cuInit", 0)
    _check(driver, "cuStreamGetCtx", ctypes.c_void_p(stream), ctypes.byref(context))
    _check(driver, "cuCtxPushCurrent_v2", context)
    try:
        _check(driver, "cuCtxGetDevice", ctypes.byref(device))
    finally:
        _check(driver, "cuCtxPopCurrent_v2", ctypes.byref(context))
    count, handle = ctypes.c_int(), ctypes.c_int()
    _check(driver, "cuDeviceGetCount", ctypes.byref(count))
    for ordinal in range(count.value):
        _check(driver, "cuDeviceGet", ctypes.byref(handle), ordinal)
        if handle.value == device.value:
            return ordinal
    raise OrtError(f"stream {stream:#x}: the driver knows no device of it")


@functools.cache
def _driver() -> Any:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise OrtError(f"{STREAM_OPTION}: the CUDA driver's library cannot be loaded: {error}") from error


def _check(driver: Any, name: str, *arguments: Any) -> None:
    code = getattr(driver, name)(*arguments)
    if code:
        raise OrtError(f"{STREAM_OPTION}: {name} failed with CUDA error {code}: is that a living stream?")
