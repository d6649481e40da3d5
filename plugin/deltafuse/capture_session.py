"""The session of a runner: made on a stream of our own, or looked at for the stream that it has."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from .assigned import Assignment
from .capture_cuda import CudaApi, CudaError
from .capture_device import CudaDevice, HostDevice, OrtCudaDevice
from .errors import DeltaFuseError
from .placement import LEGACY_DEFAULT_STREAM, STREAM_OPTION

CPU_EP = "CPUExecutionProvider"
CUDA_EP = "CUDAExecutionProvider"
#: The names of ONNX Runtime's CUDA EP, the classic one's and the plugin's.
CUDA_EPS = (CUDA_EP, "CudaPluginExecutionProvider")


def make_session(
    model: str | os.PathLike[str] | bytes,
    device: str,
    graphs: str,
    sess_options: Any,
    provider_options: Mapping[str, Mapping[str, Any]] | None,
    strict: bool,
) -> tuple[Any, HostDevice]:
    """A session and its device, on a stream of our own where the caller gave none."""
    import onnxruntime as ort

    from .session import session as make

    options = {name: dict(values) for name, values in (provider_options or {}).items()}
    mine: CudaApi | None = None
    why, stream = "", 0
    wanted = device != "cpu" and graphs != "never" and CUDA_EP in ort.get_available_providers()
    if wanted and STREAM_OPTION not in options.get(CUDA_EP, {}):
        number = device.partition(":")[2]
        try:
            mine = CudaApi(int(number) if number.isdigit() else 0)
            stream = mine.make_stream()
            options.setdefault(CUDA_EP, {})[STREAM_OPTION] = stream
        except CudaError as error:
            why = str(error)
    try:
        session = make(model, device, sess_options=sess_options, provider_options=options, strict=strict)
    except BaseException:
        if mine is not None:
            mine.spare_stream(stream)
        raise
    if mine is not None and CUDA_EP in session.get_providers():
        return session, CudaDevice(mine, stream, owned=True)
    if mine is not None:
        mine.spare_stream(stream)
    return session, device_of(session, why)


def device_of(session: Any, why: str = "") -> HostDevice:
    """Where a session's operands belong, and whether its steps can be captured."""
    name = next((name for name in session.get_providers() if name in CUDA_EPS), "")
    if not name:
        return HostDevice()
    options = session.get_provider_options().get(name, {})
    index, stream = int(options.get("device_id", 0)), int(str(options.get(STREAM_OPTION) or 0), 0)
    device = _device(index, stream, why)
    try:
        device.empty((1,), 1)
    except Exception as error:  # an onnxruntime whose CUDA EP is a plugin allocates no memory of CUDA's by itself
        return HostDevice(f"onnxruntime gives no memory of cuda:{index} to the runner: {error}")
    return device


def _device(index: int, stream: int, why: str) -> HostDevice:
    if why:
        return OrtCudaDevice(index, why)
    if stream == 0:
        return OrtCudaDevice(
            index, f"the session has no {STREAM_OPTION}: give capture() the model, or make it with one"
        )
    if stream == LEGACY_DEFAULT_STREAM:
        return OrtCudaDevice(index, "the session runs on the default stream, which CUDA cannot capture")
    try:
        return CudaDevice(CudaApi(index), stream)
    except CudaError as error:
        return OrtCudaDevice(index, str(error))


def cpu_nodes(session: Any) -> str:
    """The nodes on ORT's CPU EP, which are what most often stands in the way of a capture, as the end of a sentence."""
    from .session import assignment

    try:
        found: Assignment = assignment(session)
    except DeltaFuseError:  # no record
        return ""
    nodes = found.on(CPU_EP)
    if not nodes:
        return ""
    shown = ", ".join(f"{node.op_type} {node.name!r}" for node in nodes[:5])
    more = f" and {len(nodes) - 5} more" if len(nodes) > 5 else ""
    return f"; on the CPU run {shown}{more}"
