"""Adding the providers of a session: onnxruntime's CUDA EP, then deltafuse's EP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from . import cuda_ep
from .cuda_ep import CUDA_EP, CudaEp
from .discovery import EP_NAME
from .errors import OptionError, OrtError
from .placement import STREAM_OPTION, checked_stream


def as_text(options: Mapping[str, Any]) -> dict[str, str]:
    """Provider options as onnxruntime takes them."""
    return {str(name): str(value) for name, value in options.items()}


def add_providers(
    ort: Any,
    chosen: Any,
    cuda: CudaEp,
    kind: str,
    index: int,
    devices: Mapping[str, Any],
    options: Mapping[str, Mapping[str, str]],
    *,
    asked: bool,
) -> list[str]:
    """Add the providers of a session to its options, in the order of :func:`deltafuse.cuda_ep.provider_order`.

    Args:
        ort: onnxruntime.
        chosen: the ``SessionOptions``; unchanged where this raises, unless a plugin EP of another maker refuses its
            own device.
        cuda: the CUDA EP to use.
        kind, index: the session's device: "cuda" or "cpu", and the CUDA ordinal.
        devices: the plugin EP's devices by name ("cpu", "cuda:0").
        options: options by provider name.
        asked: did the caller give options for the CUDA EP? Then there must be one.

    Returns:
        The names of the providers.

    Raises:
        OrtError: a CUDA EP or a device that is not there, or that onnxruntime refuses.
        OptionError: options that contradict the device.
    """
    ours = devices.get("cpu" if kind == "cpu" else f"cuda:{index}")
    wanted, entry = dict(options.get(CUDA_EP, {})), None
    if kind == "cuda":
        wanted, entry = _cuda(ort, cuda, index, devices, wanted, asked)
    names = []
    foreign = entry is not None and cuda_ep.is_foreign(entry.ep_name)
    for part in cuda_ep.provider_order(kind, cuda.form, ours is not None, foreign=foreign):
        if part == "deltafuse":
            chosen.add_provider_for_devices([ours], dict(options.get(EP_NAME, {})))
            names.append(EP_NAME)
        elif part == "cpu":
            chosen.add_provider("CPUExecutionProvider", {})
            names.append("CPUExecutionProvider")
        else:
            names.append(_add_cuda(chosen, index, entry, wanted))
    return names


def _cuda(
    ort: Any, cuda: CudaEp, index: int, devices: Mapping[str, Any], given: Mapping[str, str], asked: bool
) -> tuple[dict[str, str], Any]:
    """The CUDA EP's options, checked, and the device of it where it is a plugin."""
    gpus = [name for name in devices if name.startswith("cuda:")]
    ours = devices.get(f"cuda:{index}")
    if cuda.form == "none" and (ours is None or asked):
        raise OrtError(f"cuda:{index}: {cuda.reason}")
    if gpus and ours is None:
        raise OrtError(f"cuda:{index}: there is no such device here: there is {', '.join(gpus)}")
    wanted = {"device_id": str(index), **given}
    if wanted["device_id"] != str(index):
        raise OptionError(f"{CUDA_EP} option device_id {wanted['device_id']}: expected {index}, the session's device")
    wanted = checked_stream(wanted, index)
    if cuda.form != "plugin":
        return wanted, None
    place = ours.device.metadata.get("pci_bus_id") if ours is not None else None
    entry = cuda_ep.device_for(cuda_ep.activate(ort, cuda), place, index)
    if entry is None:
        raise OrtError(f"cuda:{index}: the CUDA plugin EP {cuda.library} does not serve that device")
    if why := cuda_ep.wrong_ordinal(entry, index):
        raise OrtError(f"cuda:{index}: the CUDA plugin EP {cuda.library} does not serve that device: {why}")
    if cuda_ep.is_foreign(entry.ep_name):
        if STREAM_OPTION in wanted:
            raise OptionError(f"{STREAM_OPTION}: {entry.ep_name} is not ONNX Runtime's CUDA EP and may ignore it")
        wanted = wanted if asked else {}  # our own choices are options of ONNX Runtime's
    return wanted, entry


def _add_cuda(chosen: Any, index: int, entry: Any, wanted: dict[str, str]) -> str:
    try:
        if entry is None:
            chosen.add_provider(CUDA_EP, wanted)
            return CUDA_EP
        chosen.add_provider_for_devices([entry], cuda_ep.plugin_options(wanted))
        return str(entry.ep_name)
    except Exception as error:  # onnxruntime has no common base for its errors
        raise OrtError(
            f"cuda:{index}: onnxruntime cannot use its {CUDA_EP}, most often because a CUDA or cuDNN library was not "
            f"found: {error}"
        ) from error
