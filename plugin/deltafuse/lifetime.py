"""The end of a registration, and models that another version of deltafuse fused."""

from __future__ import annotations

import gc
import importlib
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
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
        OrtError: sessions still use the plugin EP, or the program registered its library under a name of its own.
            (onnxruntime's own ``unregister_execution_provider_library`` does
            not ask; the library then stays alive for the sessions' sake, and onnxruntime logs an error.)
    """
    module = importlib.import_module(".session", __package__)
    ort = module._onnxruntime()
    with making.over(), module._lock:
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
        try:
            ort.unregister_execution_provider_library(module.REGISTRATION_NAME)
        except Exception as error:  # onnxruntime has no common base for its errors
            raise OrtError(
                f"the plugin EP's library is registered by another name than {module.REGISTRATION_NAME!r}: whoever did "
                f"that ends it with onnxruntime.unregister_execution_provider_library(name) ({error})"
            ) from error


class Making:
    """Sessions in the making, for which the library must stay registered.

    onnxruntime frees its descriptions of a library's devices with the registration, also those that a session is just
    being made from in another thread.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """None is being made."""
        self._changed = threading.Condition()
        self._count = 0

    @contextmanager
    def one(self) -> Iterator[None]:
        """While a session is made."""
        with self._changed:
            self._count += 1
        try:
            yield
        finally:
            with self._changed:
                self._count -= 1
                self._changed.notify_all()

    @contextmanager
    def over(self) -> Iterator[None]:
        """Once none is being made; others wait until this is over."""
        with self._changed:
            self._changed.wait_for(lambda: not self._count)
            yield


making = Making()
# A process that is forked meanwhile has no such thread any more.
os.register_at_fork(after_in_child=making.forget)


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
