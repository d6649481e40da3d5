"""Where the plugin EP's library is, what was built into it, and what it says of itself.

The library is looked for in one order, and the first that is there is used:

1. an explicit path: the argument of :func:`get_library_path` (and of ``deltafuse.register``), then the environment
   variable ``DELTAFUSE_EP_PATH``, then ``DELTAFUSE_LIBRARY``, its earlier name. A path is the library or a folder that
   holds ``libdeltafuse_ep.so``. An explicit path with nothing there is an error; the search does not go on;
2. the installed package ``deltafuse``;
3. beside the application: the folders of the main module's file, of ``sys.argv[0]``, of a frozen application's files
   (``sys._MEIPASS``) and of ``sys.executable``, each as it is given and with links resolved. The working directory is
   not among them: a library must not be loaded because of where a shell happens to stand.

Importing this module loads neither onnxruntime nor the library.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import importlib.metadata
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import elf
from .errors import DeltaFuseError

EP_NAME = "DeltaFuseExecutionProvider"
LIBRARY_NAME = "libdeltafuse_ep.so"
#: Environment variables that name the library, in this order.
LIBRARY_VARIABLES = ("DELTAFUSE_EP_PATH", "DELTAFUSE_LIBRARY")


@dataclass(frozen=True)
class Place:
    """One place where the library may be.

    Attributes:
        path: the library's path, if it is there.
        source: "argument", the environment variable's name, "package" or "application".
    """

    path: Path
    source: str

    @property
    def explicit(self) -> bool:
        """Did somebody name it? Then no other place is looked at."""
        return self.source not in ("package", "application")


class PluginError(DeltaFuseError):
    """The plugin EP's library is not there, or cannot be loaded."""


def get_ep_name() -> str:
    """The name of the execution provider."""
    return EP_NAME


def get_ep_names() -> list[str]:
    """The names of the execution providers in the library: one."""
    return [EP_NAME]


def places(path: str | os.PathLike[str] | None = None) -> Iterator[Place]:
    """The places where the library is looked for, in order; after an explicit one there is none.

    Args:
        path: an explicit path, or None.

    Raises:
        PluginError: it is no path.
    """
    try:
        named = [("argument", os.fsdecode(path) if path is not None else "")]
    except TypeError as error:
        raise PluginError(f"the library's path is {path!r}: expected a path") from error
    named += [(variable, os.environ.get(variable, "")) for variable in LIBRARY_VARIABLES]
    for source, value in named:
        if value:
            given = Path(value).expanduser()
            yield Place(given / LIBRARY_NAME if given.is_dir() else given, source)
            return
    seen: set[Path] = set()
    folders = [(folder, "package") for folder in _package_folders()]
    for folder, source in folders + [(folder, "application") for folder in _application_folders()]:
        if folder not in seen:
            seen.add(folder)
            yield Place(folder / LIBRARY_NAME, source)


def find_library(path: str | os.PathLike[str] | None = None) -> Place:
    """The place of :func:`places` that is used, with an absolute path.

    Raises:
        PluginError: as :func:`get_library_path`.
    """
    looked: list[str] = []
    for place in places(path):
        if place.path.is_file():
            return Place(place.path.resolve(), place.source)
        if place.explicit:
            raise PluginError(f"{place.source} is {place.path}: there is no such file")
        if place.source == "application":
            looked.append(str(place.path.parent))
    beside = f" (nor is one beside the application: {', '.join(looked)})" if looked else ""
    raise PluginError(f"the plugin EP's library {LIBRARY_NAME} is not installed: {build_info()['missing']}{beside}")


def get_library_path(path: str | os.PathLike[str] | None = None) -> str:
    """The absolute path of the plugin EP's library, by the order at the head of this module.

    Args:
        path: a library, or a folder that holds one, to use in place of what would be found.

    Raises:
        PluginError: an explicit path names no file; or it was not built, with the reason that the build gave.
    """
    return str(find_library(path).path)


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


def cuda_status(library: str | None = None) -> str:
    """Why the library can use no CUDA device of this machine, or "" where it can.

    Args:
        library: path of the library that ORT loaded, :func:`get_library_path` by default.

    Raises:
        PluginError: there is no library.
    """
    return _text(load_library(library or get_library_path()).deltafuse_cuda_status())


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


def check_library(path: str) -> None:
    """Look at a library's header before the loader does, which crashes the process on a truncated file.

    Raises:
        PluginError: it is not a library for this machine.
    """
    why = elf.wrong_architecture(path)
    if why:
        raise PluginError(f"the plugin EP's library {path} cannot be loaded: {why}")


@functools.cache
def load_library(path: str) -> ctypes.CDLL:
    """The library through ctypes: the same copy that ORT uses, when both load it from one path.

    Raises:
        PluginError: it cannot be loaded.
    """
    check_library(path)
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


def _package_folders() -> Iterator[Path]:
    """Folders of the installed package. In an editable install the library does not lie beside the Python sources."""
    package = importlib.import_module(__name__.rpartition(".")[0])
    for folder in package.__path__:
        yield Path(folder).resolve()
    try:
        yield Path(str(importlib.metadata.distribution("deltafuse").locate_file("deltafuse"))).resolve()
    except importlib.metadata.PackageNotFoundError:
        return


def _package_file(name: str) -> Path | None:
    files = (folder / name for folder in _package_folders())
    return next((file.resolve() for file in files if file.is_file()), None)


def _application_folders() -> Iterator[Path]:
    """Folders beside the running program."""
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    for program in (main, sys.argv[0] if sys.argv else None):
        if program and Path(program).is_file():  # not "-c", "-m" or "": those would mean the working directory
            yield from _as_given_and_resolved(Path(program))
    unpacked = getattr(sys, "_MEIPASS", None)
    if unpacked:
        yield Path(unpacked).resolve()
    if sys.executable:
        yield from _as_given_and_resolved(Path(sys.executable))


def _as_given_and_resolved(file: Path) -> Iterator[Path]:
    yield file.absolute().parent
    yield file.resolve().parent
