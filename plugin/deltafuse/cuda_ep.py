"""Which CUDA execution provider of ONNX Runtime a session uses, and in which order the providers stand.

ONNX Runtime has its CUDA EP in two forms: the classic provider inside the wheel, and a plugin library. In this order:

1. the plugin library that ``ORT_CUDA_PLUGIN_EP_PATH`` names: an explicit path always wins;
2. a CUDA plugin EP that the program, or onnxruntime itself, has registered already;
3. the classic provider;
4. a CUDA plugin library found beside the runtime: in onnxruntime's folder, or the package ``onnxruntime_ep_cuda``;
5. none: the plugin EP of deltafuse runs alone, with the CPU EP for all other nodes.

Never two of them in one session. ONNX Runtime's CUDA EP stands before deltafuse's: the first EP of a device supplies
the streams and the memory of both, and a CUDA EP's kernels crash on a stream that is not of their own type.

A CUDA plugin EP of another maker, which only ``ORT_CUDA_PLUGIN_EP_PATH`` brings in, stands behind deltafuse's. ONNX
Runtime takes the copies between the CPU and a device from the first EP of that device; one that has no kernels for them
(nxrt-ep-cuda 0.1.0.dev6, seen on an H200) lets addresses of host memory reach the kernels of all EPs there.
deltafuse's EP has them, and may stand first because it makes no streams of its own.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from .errors import OrtError

CUDA_EP = "CUDAExecutionProvider"
#: The names that CUDA plugin EPs have given themselves, the present one first.
PLUGIN_EP_NAMES = (CUDA_EP, "CudaPluginExecutionProvider")
#: Environment variable: the CUDA plugin library to use.
PATH_VARIABLE = "ORT_CUDA_PLUGIN_EP_PATH"
#: The name that a CUDA plugin library is registered under here.
REGISTRATION_NAME = "deltafuse_cuda_plugin"

Form = Literal["classic", "plugin", "none"]

#: The file of the classic provider, and of the plugin in builds that have the CUDA EP as one.
PROVIDER_LIBRARY = "libonnxruntime_providers_cuda.so"
_PLUGIN_LIBRARY = "libonnxruntime_providers_cuda_plugin.so"
_PLUGIN_BUILD = ", cuda-plugin-ep="


@dataclass(frozen=True)
class CudaEp:
    """The CUDA EP that sessions use.

    Attributes:
        form: "classic", "plugin" or "none".
        library: the plugin's library; "" for the other forms, or where it is registered from an unknown path.
        registered: is it registered with onnxruntime already?
        reason: why this one.
        unused: CUDA EPs that are there too and are left alone, as text.
    """

    form: Form
    library: str = ""
    registered: bool = False
    reason: str = ""
    unused: tuple[str, ...] = ()


def decide(
    *, explicit: str | None, classic: bool, registered: Sequence[str] = (), beside: Sequence[str] = ()
) -> CudaEp:
    """Choose a CUDA EP from what is there.

    Args:
        explicit: the path in ``ORT_CUDA_PLUGIN_EP_PATH``, or None.
        classic: does the wheel have the classic provider?
        registered: libraries of the CUDA plugin EPs that onnxruntime has registered, "" where one does not say.
        beside: CUDA plugin libraries beside the runtime.
    """
    candidates: list[CudaEp] = []
    if explicit:
        again = any(_same_file(explicit, path) for path in registered)
        candidates.append(CudaEp("plugin", explicit, again, f"{PATH_VARIABLE} names it"))
    candidates += [CudaEp("plugin", path, True, "it is registered with onnxruntime") for path in registered]
    if classic:
        candidates.append(CudaEp("classic", reason="the wheel of onnxruntime has it"))
    candidates += [CudaEp("plugin", path, False, "it lies beside the runtime") for path in beside]
    if not candidates:
        return CudaEp("none", reason=f"this onnxruntime has no {CUDA_EP}; onnxruntime-gpu has")
    chosen, unused = candidates[0], []
    for other in candidates[1:]:
        same = other.form == chosen.form == "plugin" and _same_file(other.library, chosen.library)
        text = (
            f"the plugin {other.library}" if other.form == "plugin" else "the classic provider in onnxruntime's wheel"
        )
        if not same and text not in unused:
            unused.append(text)
    return CudaEp(chosen.form, chosen.library, chosen.registered, chosen.reason, tuple(unused))


def find(ort: Any) -> CudaEp:
    """What :func:`decide` chooses for this onnxruntime and environment. Registers nothing."""
    registered = [device.ep_metadata.get("library_path", "") for device in plugin_devices(ort)]
    plugin_build = _PLUGIN_BUILD in ort.get_build_info()
    # A registered plugin EP is among the available providers too; then the question does not arise.
    classic = CUDA_EP in ort.get_available_providers() and not plugin_build and not registered
    return decide(
        explicit=os.environ.get(PATH_VARIABLE) or None,
        classic=classic,
        registered=list(dict.fromkeys(registered)),
        beside=libraries_beside(Path(str(ort.__file__)).parent, plugin_build),
    )


def libraries_beside(package: Path, plugin_build: bool) -> list[str]:
    """CUDA plugin libraries beside the runtime.

    Args:
        package: onnxruntime's folder.
        plugin_build: was it built with the CUDA EP as a plugin? The library then has the classic provider's file name.
    """
    names = [_PLUGIN_LIBRARY, *([PROVIDER_LIBRARY] if plugin_build else [])]
    found = [package / "capi" / name for name in names]
    found += [package.parent / "onnxruntime_ep_cuda" / name for name in (PROVIDER_LIBRARY, _PLUGIN_LIBRARY)]
    return [str(path) for path in found if path.is_file()]


def plugin_devices(ort: Any, library: str = "") -> list[Any]:
    """The devices of CUDA plugin EPs that are registered with onnxruntime.

    Of a library that somebody named, here or in ``ORT_CUDA_PLUGIN_EP_PATH``, whatever its EP calls itself; of others,
    those that have one of the names of ONNX Runtime's own.
    """
    named = library or os.environ.get(PATH_VARIABLE, "")
    return [
        device
        for device in ort.get_ep_devices()
        if device.ep_name in PLUGIN_EP_NAMES
        or (named and _same_file(device.ep_metadata.get("library_path", ""), named))
    ]


def activate(ort: Any, chosen: CudaEp) -> list[Any]:
    """The devices of the chosen plugin EP, which is registered where it is not yet.

    Raises:
        OrtError: there is no such file, onnxruntime refuses it, or it offers no device.
    """
    if not chosen.registered:
        if not Path(chosen.library).is_file():
            raise OrtError(f"{PATH_VARIABLE} is {chosen.library}: there is no such file")
        try:
            ort.register_execution_provider_library(REGISTRATION_NAME, chosen.library)
        except Exception as error:  # onnxruntime has no common base for its errors
            raise OrtError(f"onnxruntime does not take the CUDA plugin EP {chosen.library}: {error}") from error
    devices = [
        device
        for device in plugin_devices(ort, chosen.library)
        if not chosen.library or _same_file(device.ep_metadata.get("library_path", ""), chosen.library)
    ]
    if not devices:
        raise OrtError(f"the CUDA plugin EP {chosen.library} offers no device here")
    return devices


def device_for(devices: Iterable[Any], bus_id: str | None, index: int) -> Any | None:
    """The plugin EP's device with this PCI bus id; where none is known, the one with this CUDA ordinal."""
    known = list(devices)
    if bus_id:
        return next((device for device in known if device.device.metadata.get("pci_bus_id") == bus_id), None)
    numbered = [device for device in known if device.ep_metadata.get("cuda_device_id") == str(index)]
    return numbered[0] if numbered else (known[0] if len(known) == 1 and index == 0 else None)


def is_foreign(ep_name: str) -> bool:
    """Is this CUDA EP, which serves a session, another maker's and not ONNX Runtime's own?"""
    return ep_name not in PLUGIN_EP_NAMES


def provider_order(kind: str, cuda: Form, ours: bool, *, foreign: bool = False) -> tuple[str, ...]:
    """The order in which session() adds providers; ONNX Runtime puts its CPU EP behind them.

    Args:
        kind: "cuda" or "cpu", the session's device.
        cuda: the form of the CUDA EP.
        ours: does deltafuse's EP serve the session's device?
        foreign: is the CUDA EP a plugin of another maker?

    Returns:
        Of "classic", "plugin", "deltafuse" and "cpu". Empty where nothing serves a CUDA device.
    """
    if kind == "cpu":
        return ("deltafuse",) if ours else ("cpu",)
    theirs = (cuda,) if cuda != "none" else ()
    if not ours:
        return theirs
    return ("deltafuse", *theirs) if foreign else (*theirs, "deltafuse")


def stream_refusal(ort: Any, chosen: CudaEp) -> str:
    """Why sessions on this CUDA EP cannot be put on a stream, "" where they can. Registers a plugin.

    Raises:
        OrtError: as :func:`activate`.
    """
    if chosen.form == "none":
        return chosen.reason
    if chosen.form == "plugin":
        for device in activate(ort, chosen):
            if is_foreign(device.ep_name):
                return (
                    f"{device.ep_name} is not ONNX Runtime's CUDA EP, and may work on another stream than it is given"
                )
    return ""


def of_session(ort: Any, providers: Sequence[str]) -> str:
    """Which of a session's providers is its CUDA EP; "" where none is."""
    names = {*PLUGIN_EP_NAMES, *(device.ep_name for device in plugin_devices(ort))}
    return next((name for name in providers if name in names), "")


def wrong_ordinal(entry: Any, index: int) -> str:
    """Why a plugin EP's device is not the CUDA device of this ordinal, by the memory that it declares, or ""."""
    try:
        import onnxruntime as ort

        memory = entry.memory_info(ort.OrtDeviceMemoryType.DEFAULT)
    except Exception:  # an onnxruntime that cannot be asked
        return ""
    if memory is None or memory.device_id == index:
        return ""
    return f"{entry.ep_name} works with the memory of cuda:{memory.device_id} there"


def plugin_options(options: Mapping[str, str]) -> dict[str, str]:
    """The options of the classic provider as the plugin takes them: the device is given by other means."""
    return {name: value for name, value in options.items() if name != "device_id"}


def _same_file(one: str, other: str) -> bool:
    if not one or not other:
        return one == other
    return os.path.realpath(one) == os.path.realpath(other)
