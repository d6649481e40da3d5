"""The end of a registration, and models that another version of deltafuse fused."""

from __future__ import annotations

import gc
import importlib
from typing import Any

from . import __version__
from .discovery import load_library
from .errors import OrtError

#: The key in a fused model's metadata that names the deltafuse that wrote it.
VERSION_KEY = "deltafuse.version"


def unregister() -> None:
    """Take the plugin EP's library out of onnxruntime again. Does nothing where it is not registered.

    The library itself stays mapped until the process ends.

    Raises:
        OrtError: sessions still use the plugin EP. (onnxruntime's own ``unregister_execution_provider_library`` does
            not ask; the library then stays alive for the sessions' sake, and onnxruntime logs an error.)
    """
    module = importlib.import_module(".session", __package__)
    ort = module._onnxruntime()
    with module._lock:
        devices = module._ep_devices(ort)
        if not devices:
            return
        living = living_sessions(devices[0].ep_metadata["library_path"])
        if living:
            gc.collect()  # sessions in reference cycles are garbage, not in use
            living = living_sessions(devices[0].ep_metadata["library_path"])
        if living:
            raise OrtError(
                f"{living} session{'s' if living > 1 else ''} still use{'' if living > 1 else 's'} the plugin EP: "
                "drop every reference to them first (del session)"
            )
        ort.unregister_execution_provider_library(module.REGISTRATION_NAME)


def living_sessions(library: str) -> int:
    """How many sessions of this process use the library at this path.

    Raises:
        PluginError: it cannot be loaded.
    """
    return int(load_library(library).deltafuse_living_sessions())


def other_version(session: Any) -> str:
    """Which other deltafuse fused a session's model, as a remark; "" where it was this one, or none says so."""
    try:
        version = str(session.get_modelmeta().custom_metadata_map.get(VERSION_KEY, ""))
    except Exception:  # not a session of this onnxruntime: nothing is known
        return ""
    if version in ("", __version__):
        return ""
    return f"the model was fused by deltafuse {version}, this is {__version__}"
