"""Olive's package config with the pass ``DeltaFuse`` in it. Olive itself is not imported: that takes many seconds.

A file given to ``olive run --package-config`` replaces Olive's own, and Olive's passes with it. So the file written
here is Olive's own, complete, with one entry more.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
from pathlib import Path
from typing import Any

from . import __version__
from .errors import DeltaFuseError, OptionError
from .model_save import write_text

PASS_NAME = "DeltaFuse"
#: Olive admits only execution providers, devices and precisions of its own lists, hence "*".
PASS_ENTRY: dict[str, Any] = {
    "module_path": "deltafuse.olive.DeltaFuse",
    "supported_providers": ["*"],
    "supported_accelerators": ["*"],
    "supported_precisions": ["*"],
    "supported_algorithms": [],
    "supported_quantization_encodings": [],
}


class OliveError(DeltaFuseError):
    """Olive is missing, or not as this adapter knows it."""


def default_config_path() -> Path:
    """The file of the package config that the installed Olive uses by default.

    Raises:
        OliveError: Olive is not installed, or has no such file.
    """
    found = importlib.util.find_spec("olive")
    if found is None or not found.origin:
        raise OliveError("Olive is not installed: `pip install 'deltafuse[olive]'`")
    path = Path(found.origin).with_name("olive_config.json")
    if not path.is_file():
        raise OliveError(f"this Olive has no {path.name} ({path.parent}): deltafuse works with olive-ai 0.13")
    return path


def package_config(base: str | os.PathLike[str] | None = None) -> dict[str, Any]:
    """Olive's package config with ``DeltaFuse``, as ``olive.workflows.run(config, package_config=...)`` takes it.

    Args:
        base: a package config to add to Olive's own as well, for example one with passes of yours.

    Raises:
        OliveError: Olive is not installed.
        OptionError: ``base`` is no package config.
    """
    config = _read(default_config_path())
    if base is not None:
        more = _read(Path(base))
        for part in ("passes", "extra_dependencies"):
            config[part] = {**config.get(part, {}), **more.get(part, {})}
    config["passes"][PASS_NAME] = dict(PASS_ENTRY)
    return config


def write_package_config(
    path: str | os.PathLike[str] | None = None, base: str | os.PathLike[str] | None = None
) -> Path:
    """Write :func:`package_config` to a file and return its absolute path.

    Args:
        path: the file. By default one in the user's cache folder (``XDG_CACHE_HOME``, else ``~/.cache``), named after
            the versions of Olive and deltafuse.
        base: as for :func:`package_config`.

    Raises:
        OliveError, OptionError: as :func:`package_config`.
        OutputError: the file cannot be written.
    """
    text = json.dumps(package_config(base), indent=2) + "\n"
    if path is None:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "deltafuse"
        try:
            cache.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OptionError(f"{cache} cannot be made ({error.strerror}): say where with --output") from error
        name = "" if base is None else f"-{Path(base).stem}"
        path = cache / f"olive-{_olive_version()}-deltafuse-{__version__}{name}.json"
    target = Path(path).absolute()
    write_text(target, text)
    return target


def _olive_version() -> str:
    try:
        return importlib.metadata.version("olive-ai")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def _read(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise OptionError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(config, dict) or not isinstance(config.get("passes"), dict):
        raise OptionError(f"{path} is no package config of Olive's: it has no object `passes`")
    return config
