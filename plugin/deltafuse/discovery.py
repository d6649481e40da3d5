"""Where the plugin EP's library is, what was built into it, and what it says of itself.

Importing this module loads neither onnxruntime nor the library.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import importlib.metadata
import json
import os
from pathlib import Path
from typing import Any

from .errors import DeltaFuseError

EP_NAME = "DeltaFuseExecutionProvider"
LIBRARY_NAME = "libdeltafuse_ep.so"
#: Environment variable: a library to use in place of the installed one.
LIBRARY_VARIABLE = "DELTAFUSE_LIBRARY"


class PluginError(DeltaFuseError):
    """The plugin EP's library is not there, or cannot be loaded."""


def get_ep_name() -> str:
    """The name of the execution provider."""
    return EP_NAME


def get_ep_names() -> list[str]:
    """The names of the execution providers in the library: one."""
    return [EP_NAME]


def get_library_path() -> str:
    """The absolute path of the plugin EP's library.

    Raises:
        PluginError: it was not built, with the reason that the build gave; or ``DELTAFUSE_LIBRARY`` names no file.
    """
    chosen = os.environ.get(LIBRARY_VARIABLE)
    if chosen:
        if not Path(chosen).is_file():
            raise PluginError(f"{LIBRARY_VARIABLE} is {chosen}: there is no such file")
        return str(Path(chosen).resolve())
    found = _package_file(LIBRARY_NAME)
    if found is None:
        raise PluginError(f"the plugin EP's library {LIBRARY_NAME} is not installed: {build_info()['missing']}")
    return str(found)


def build_info() -> dict[str, Any]:
    """What the build of this installation made.

    Returns:
        ``version``; ``native``: was the library built; ``missing``: why not, else ""; ``ort_headers``: which of the
        four places they came from; ``cuda_archs``: architectures of the CUDA kernels; ``cuda_note``: why none.
    """
    info: dict[str, Any] = {
        "version": "",
        "native": False,
        "missing": "deltafuse runs from its source tree: pip install . builds the library",
        "ort_headers": "",
        "cuda_archs": [],
        "cuda_note": "",
    }
    found = _package_file("_build_info.json")
    if found is not None:
        info.update(json.loads(found.read_text(encoding="utf-8")))
    return info


def cuda_status() -> str:
    """Why the library can use no CUDA device of this machine, or "" where it can.

    Raises:
        PluginError: there is no library.
    """
    return _text(load_library(get_library_path()).deltafuse_cuda_status())


def refusals(tag: str, library: str | None = None) -> list[dict[str, str]]:
    """The nodes that living EPs of the sessions with this tag refused, and why.

    Args:
        tag: the session's ``session_tag`` option; "" for all sessions.
        library: path of the library that ORT loaded, :func:`get_library_path` by default.

    Returns:
        One dict a node: ``domain``, ``op_type``, ``node`` (its name, may be ""), ``output`` (its first), ``reason``.
    """
    text = _text(load_library(library or get_library_path()).deltafuse_refusals(tag.encode()))
    found: list[dict[str, str]] = json.loads(text)
    return found


@functools.cache
def load_library(path: str) -> ctypes.CDLL:
    """The library through ctypes: the same copy that ORT uses, when both load it from one path.

    Raises:
        PluginError: it cannot be loaded.
    """
    try:
        library = ctypes.CDLL(path)
        library.deltafuse_refusals.argtypes = [ctypes.c_char_p]
        for name in ("deltafuse_version", "deltafuse_cuda_archs", "deltafuse_cuda_status", "deltafuse_refusals"):
            getattr(library, name).restype = ctypes.c_char_p
    except (OSError, AttributeError) as error:
        raise PluginError(f"the plugin EP's library {path} cannot be loaded: {error}") from error
    return library


def _text(value: bytes | None) -> str:
    return (value or b"").decode("utf-8", "replace")


def _package_file(name: str) -> Path | None:
    """A file of the installed package. In an editable install it does not lie beside the Python sources."""
    package = importlib.import_module(__name__.rpartition(".")[0])
    places = [Path(place) / name for place in package.__path__]
    try:
        places.append(Path(str(importlib.metadata.distribution("deltafuse").locate_file(f"deltafuse/{name}"))))
    except importlib.metadata.PackageNotFoundError:
        pass
    return next((place.resolve() for place in places if place.is_file()), None)
