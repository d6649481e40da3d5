"""The session of a runner: made on a stream of our own, or looked at for the stream that it has."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from . import cuda_ep
from .assigned import Assignment
from .capture_cuda import CudaApi, CudaError
from .capture_device import CudaDevice, HostDevice, OrtCudaDevice
from .cuda_ep import CUDA_EP
from .errors import DeltaFuseError, OrtError
from .placement import LEGACY_DEFAULT_STREAM, STREAM_OPTION

CPU_EP = "CPUExecutionProvider"


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

    from .session import auto_device, parse_device
    from .session import session as make

    options = {name: dict(values) for name, values in (provider_options or {}).items()}
    mine: CudaApi | None = None
    why, stream = "", 0
    if device != "cpu" and graphs != "never" and STREAM_OPTION not in options.get(CUDA_EP, {}):
        try:
            why = cuda_ep.stream_refusal(ort, cuda_ep.find(ort))
            kind, index = auto_device() if device == "auto" and not why else parse_device(device)
            if kind == "cuda" and not why:
                mine = CudaApi(index)
                stream = mine.make_stream()
                options.setdefault(CUDA_EP, {})[STREAM_OPTION] = stream
        except (CudaError, OrtError) as error:
            why = str(error)
    try:
        session = make(model, device, sess_options=sess_options, provider_options=options, strict=strict)
    except BaseException:
        if mine is not None:
            mine.spare_stream(stream)
        raise
    if mine is not None and cuda_ep.of_session(ort, session.get_providers()):
        return session, CudaDevice(mine, stream, owned=True)
    if mine is not None:
        mine.spare_stream(stream)
    return session, device_of(session, why)


def device_of(session: Any, why: str = "") -> HostDevice:
    """Where a session's operands belong, and whether its steps can be captured."""
    import onnxruntime as ort

    name = cuda_ep.of_session(ort, session.get_providers())
    if not name:
        return HostDevice()
    options = session.get_provider_options().get(name, {})
    index, stream = _ordinal(session, options), int(str(options.get(STREAM_OPTION) or 0), 0)
    if cuda_ep.is_foreign(name) and not why:
        why = f"{name} is not ONNX Runtime's CUDA EP, and may work on another stream than it is given"
    device = _device(index, stream, why)
    try:
        device.empty((1,), 1)
    except Exception as error:  # an onnxruntime whose CUDA EP is a plugin allocates no memory of CUDA's by itself
        return HostDevice(f"onnxruntime gives no memory of cuda:{index} to the runner: {error}")
    return device


def _ordinal(session: Any, options: Mapping[str, str]) -> int:
    """The session's CUDA ordinal: the classic provider's option, else where its operands are to lie."""
    if "device_id" in options:
        return int(options["device_id"])
    places = [*session.get_output_memory_infos(), *session.get_input_memory_infos()]
    return next((int(place.device_id) for place in places if place and str(place.name).lower() != "cpu"), 0)


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
