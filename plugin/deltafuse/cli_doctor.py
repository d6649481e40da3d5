"""``deltafuse doctor``: what is installed, whether the plugin loads here, and what can run on it."""

from __future__ import annotations

import importlib.metadata
import platform
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from . import __version__
from .registry import runtimes, targets
from .registry.ops import OPS

_PACKAGES = ("numpy", "ml_dtypes", "onnx", "onnx-ir", "onnxscript", "typer", "rich")
_RUNTIMES = ("onnxruntime", "onnxruntime-gpu")


def examine() -> dict[str, Any]:
    """Look at this machine and installation. Never raises: what fails becomes a finding with its reason."""
    runtime = _runtime()
    findings: dict[str, Any] = {
        "deltafuse": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "onnxruntime": runtime,
        "plugin": _plugin(runtime),
        "targets": [],
    }
    for target in targets.TARGETS:
        for op in OPS:
            why = targets.refusal(op, target, runtime["version"]) if runtime["version"] else None
            reason = (why.reason if why else "") if runtime["version"] else "there is no onnxruntime"
            findings["targets"].append({"target": target, "op": op, "runs": not reason, "reason": reason})
    return findings


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _runtime() -> dict[str, Any]:
    wheels = {name: version for name in _RUNTIMES if (version := _version(name))}
    found: dict[str, Any] = {"version": None, "wheels": wheels, "providers": [], "lacks": [], "problem": None}
    try:
        import onnxruntime

        found["version"] = str(onnxruntime.__version__)
        found["providers"] = list(onnxruntime.get_available_providers())
        found["lacks"] = runtimes.lacks(found["version"])
    except Exception as error:  # an import of a native package can fail in many ways
        found["problem"] = f"importing onnxruntime failed: {_text(error)}"
        return found
    if targets.parse_version(found["version"]) < targets.MIN_ORT:
        needs = ".".join(map(str, targets.MIN_ORT))
        found["problem"] = f"onnxruntime {found['version']} is too old: proofs and the plugin need {needs} or newer"
    elif len(wheels) > 1:
        found["problem"] = "two onnxruntime wheels are installed over one another: uninstall both, then install one"
    return found


def _plugin(runtime: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {
        "library": None,
        "build": None,
        "cuda": "",
        "loads": False,
        "devices": [],
        "problem": None,
    }
    try:
        from .discovery import build_info, cuda_status, get_ep_names, get_library_path

        found["build"] = build_info()
        found["library"] = str(get_library_path())
        found["cuda"] = cuda_status() if found["build"]["cuda_archs"] else ""
        names = list(get_ep_names())
    except Exception as error:
        found["problem"] = _text(error)
        return found
    if runtime["version"] is None:
        found["problem"] = "not tried: there is no onnxruntime to load it into"
        return found
    try:
        import onnxruntime

        from .session import register

        register()
        found["loads"] = True
        for device in onnxruntime.get_ep_devices():
            if device.ep_name in names:
                kind = str(device.device.type).rpartition(".")[2]
                found["devices"].append({"ep": device.ep_name, "type": kind, "vendor": device.device.vendor})
    except Exception as error:
        found["problem"] = _text(error)
    return found


def _text(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def render(findings: dict[str, Any], out: Console) -> None:
    """Print the findings, problems marked."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")

    def line(label: str, value: str, problem: str | None = None) -> None:
        table.add_row(label, escape(value))
        if problem:
            table.add_row("", f"[yellow]{escape(problem)}[/]")

    line("deltafuse", findings["deltafuse"])
    line("python", f"{findings['python']} on {findings['platform']}")
    packages = findings["packages"]
    line("packages", ", ".join(f"{name} {version or 'missing'}" for name, version in packages.items()))
    runtime = findings["onnxruntime"]
    line("onnxruntime", runtime["version"] or "none", runtime["problem"])
    for lack in runtime["lacks"]:
        line("", lack)
    if runtime["providers"]:
        line("providers", ", ".join(runtime["providers"]))
    plugin = findings["plugin"]
    line("plugin", plugin["library"] or "no library", plugin["problem"])
    build = plugin["build"] or {}
    if build.get("native"):
        archs = ", ".join(f"sm_{arch}" for arch in build["cuda_archs"]) or f"none: {build['cuda_note']}"
        line("", f"built with ONNX Runtime's headers from: {build['ort_headers']}; CUDA kernels: {archs}")
    if plugin["cuda"]:
        line("", f"CUDA: {plugin['cuda']}")
    if plugin["loads"]:
        devices = [f"{device['type']} ({device['vendor']})" for device in plugin["devices"]]
        line("loads", "yes; devices: " + (", ".join(devices) or "none"))
    for entry in findings["targets"]:
        verdict = "runs here" if entry["runs"] else f"does not run here: {entry['reason']}"
        if entry["runs"] and targets.TARGETS[entry["target"]].kernels_need_plugin:
            verdict += ", on the plugin's kernels" if plugin["loads"] else ", by its ONNX body (no plugin)"
        line("target", f"{entry['target']}: {entry['op']} {verdict}")
    out.print(table)
