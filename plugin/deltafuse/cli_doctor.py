"""``deltafuse doctor``: what decides where a fused model runs on this machine, what is wrong, and what to do next.

Finding is apart from judging: :func:`examine` asks onnxruntime, the library, the driver and the kernel; the lines and
the verdict (:mod:`deltafuse.doctor_problems`) follow from the findings alone.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import platform
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from . import __version__, cuda_ep, discovery, doctor_gpu, doctor_problems, elf
from .custom_ops.kda.spec import HEAD_DIMS_CUDA
from .custom_ops.mla.spec import MAX_HEAD_CUDA, MAX_ROW_CUDA
from .doctor_gpu import dotted
from .errors import DeltaFuseError
from .registry import targets
from .registry.ops import OPS

_PACKAGES = ("numpy", "ml_dtypes", "onnx", "onnx-ir", "onnxscript", "typer", "rich")
_RUNTIMES = ("onnxruntime", "onnxruntime-gpu")


def examine() -> dict[str, Any]:
    """Look at this machine and installation, and register the plugin EP. Never raises: what fails becomes a finding.

    Returns:
        Plain data, as ``deltafuse doctor --json`` prints it: ``onnxruntime``, ``driver``, ``gpus``, ``plugin``,
        ``cuda_ep``, ``ops``, ``targets``, ``problems`` (each with ``id``, ``level``, ``message``, ``next``) and
        ``verdict`` (``runs``, ``text``, ``next``, ``exit_code``).
    """
    driver = doctor_gpu.probe()
    runtime = _runtime()
    plugin = _plugin(runtime)
    found: dict[str, Any] = {
        "deltafuse": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "onnxruntime": runtime,
        "driver": {
            "version": driver.version,
            "cuda": driver.cuda,
            "library": doctor_gpu.DRIVER_LIBRARY,
            "loads": driver.loads,
            "problem": driver.problem,
            "present": driver.present,
            "pci": list(driver.pci),
        },
        "gpus": [asdict(gpu) for gpu in driver.gpus],
        "plugin": plugin,
        "cuda_ep": _cuda_ep(runtime),
        "ops": _ops(plugin, driver),
        "targets": _targets(runtime),
    }
    if runtime["usable"]:  # again: registering adds devices and names
        runtime.update(_offers())
    found["problems"] = doctor_problems.problems(found)
    found["verdict"] = doctor_problems.verdict(found)
    return found


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _runtime() -> dict[str, Any]:
    found: dict[str, Any] = {
        "version": None,
        "build": "",
        "path": "",
        "wheels": {name: version for name in _RUNTIMES if (version := _version(name))},
        "providers": [],
        "devices": [],
        "usable": False,
        "missing": False,
        "problem": None,
    }
    try:
        import onnxruntime

        found["version"] = str(onnxruntime.__version__)
        found["path"] = str(Path(str(onnxruntime.__file__)).parent)
    except Exception as error:  # an import of a native package can fail in many ways
        found["missing"] = isinstance(error, ModuleNotFoundError) and error.name == "onnxruntime"
        found["problem"] = _text(error)
        return found
    try:
        found["build"] = str(onnxruntime.get_build_info())
    except Exception as error:  # very old ones have no such function
        found["build"] = f"unknown: {_text(error)}"
    if targets.parse_version(found["version"]) < targets.MIN_ORT:
        needs = ".".join(map(str, targets.MIN_ORT))
        found["problem"] = f"onnxruntime {found['version']} is too old: deltafuse needs {needs} or newer"
        return found
    try:
        found.update(_offers())
    except Exception as error:  # a build without plugin EPs
        found["problem"] = f"onnxruntime {found['version']} cannot be asked for its EP devices: {_text(error)}"
        return found
    found["usable"] = True
    return found


def _offers() -> dict[str, Any]:
    """onnxruntime's providers and EP devices, as they are now."""
    import onnxruntime

    devices = [
        {
            "ep": device.ep_name,
            "type": str(device.device.type).rpartition(".")[2],
            "vendor": device.device.vendor,
            "pci_bus_id": dict(device.device.metadata).get("pci_bus_id", ""),
            "metadata": dict(device.ep_metadata),
        }
        for device in onnxruntime.get_ep_devices()
    ]
    return {"providers": list(onnxruntime.get_available_providers()), "devices": devices}


def _plugin(runtime: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {
        "library": None,
        "source": "",
        "searched": [str(place.path) for place in discovery.places()],
        "build": None,
        "damage": "",
        "wrong_machine": "",
        "loader": "",
        "missing": [],
        "version": "",
        "cuda_archs": [],
        "cuda_runtime": 0,
        "cuda": "",
        "loads": False,
        "devices": [],
        "registered_from": "",
        "name_taken": False,
        "problem": None,
    }
    try:
        found["build"] = discovery.build_info()
        place = discovery.find_library()
    except DeltaFuseError as error:
        found["problem"] = _text(error)
        return found
    found["library"], found["source"] = str(place.path), place.source
    found["damage"] = elf.damage(place.path) or elf.killed_by_loading(place.path)
    if found["damage"]:  # the loader is not asked here: it may crash
        found["problem"] = found["damage"]
        return found
    found["wrong_machine"] = elf.wrong_architecture(place.path)
    try:
        found["loader"] = _loader_says(place.path)
        library = discovery.load_library(str(place.path))
    except DeltaFuseError as error:
        found["loader"] = found["loader"] or _text(error.__cause__ or error)
        found["problem"] = _text(error)
        if not found["wrong_machine"]:
            found["missing"] = [asdict(entry) for entry in elf.missing_libraries(place.path)]
        return found
    found["version"] = (library.deltafuse_version() or b"").decode()
    found["cuda_archs"] = [arch for arch in (library.deltafuse_cuda_archs() or b"").decode().split(";") if arch]
    if found["cuda_archs"]:
        found["cuda"] = (library.deltafuse_cuda_status() or b"").decode("utf-8", "replace")
        if hasattr(library, "deltafuse_cuda_runtime_version"):
            found["cuda_runtime"] = int(library.deltafuse_cuda_runtime_version())
    if runtime["usable"]:
        _register(found)
    else:
        found["problem"] = "not tried: there is no onnxruntime to load it into"
    return found


def _loader_says(path: Path) -> str:
    """The loader's own message, "" where it loads the file."""
    try:
        ctypes.CDLL(str(path))
    except OSError as error:
        return _text(error)
    return ""


def _register(found: dict[str, Any]) -> None:
    """Let onnxruntime load the library, and note what it then offers."""
    import onnxruntime

    from .session import register

    def devices() -> list[Any]:
        return [device for device in onnxruntime.get_ep_devices() if device.ep_name == discovery.EP_NAME]

    before = [str(device.ep_metadata.get("library_path", "")) for device in devices()]
    others = [path for path in before if path and str(Path(path).resolve()) != found["library"]]
    found["registered_from"] = others[0] if others else ""
    try:
        register()
    except Exception as error:  # onnxruntime has no common base for its errors
        found["problem"] = _text(error)
        found["name_taken"] = "another library under the name" in found["problem"]
        return
    found["loads"] = True
    for device in devices():
        found["devices"].append(
            {
                "ep": device.ep_name,
                "name": str(device.ep_metadata.get("deltafuse_device", "")),
                "type": str(device.device.type).rpartition(".")[2],
                "vendor": device.device.vendor,
                "pci_bus_id": dict(device.device.metadata).get("pci_bus_id", ""),
            }
        )


def _cuda_ep(runtime: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {"form": "none", "library": "", "reason": "", "unused": [], "file_missing": False}
    found |= {"missing": [], "problem": ""}
    if not runtime["usable"]:
        return found
    import onnxruntime

    chosen = cuda_ep.find(onnxruntime)
    found |= {"form": chosen.form, "library": chosen.library, "reason": chosen.reason, "unused": list(chosen.unused)}
    library = Path(chosen.library) if chosen.library else Path(runtime["path"]) / "capi" / cuda_ep.PROVIDER_LIBRARY
    if chosen.form == "plugin" and chosen.library and not library.is_file():
        found["file_missing"] = True
        found["problem"] = f"{library}: there is no such file"
    if chosen.form != "none" and library.is_file():
        try:
            missing = elf.missing_cuda_libraries(library)
        except (elf.ElfError, OSError) as error:
            found["problem"] = f"{library}: {_text(error)}"
            return found
        found["missing"] = [asdict(entry) for entry in missing]
        linked = [entry.library for entry in missing if entry.linked]
        if linked:
            found["problem"] = f"{', '.join(linked)} not found"
    return found


#: What the CUDA kernels take, by op.
_CUDA_LIMITS = {
    "kda": f"head dims {', '.join(map(str, HEAD_DIMS_CUDA))}",
    "mla": f"kv_lora_rank + qk_rope_head_dim up to {MAX_ROW_CUDA}, heads of an expanded cache up to {MAX_HEAD_CUDA}",
}


def _ops(plugin: dict[str, Any], driver: doctor_gpu.Driver) -> list[dict[str, Any]]:
    """For each op and device: does the library have a kernel, with what limits, or why not."""
    served = {entry["name"] for entry in plugin["devices"]}
    gpus = {f"cuda:{gpu.index}": gpu for gpu in driver.gpus}
    found = []
    for op in OPS:
        for device in ["cpu", *sorted(served - {"cpu"} | set(gpus))]:
            reason, limits = "", "any geometry"
            if device not in served:
                reason = plugin["cuda"] or plugin["problem"] or f"the plugin does not serve {device}"
                if not plugin["cuda_archs"] and device != "cpu" and plugin["loads"]:
                    reason = "the library has no CUDA kernels"
            if device in gpus and plugin["cuda_archs"]:
                capability = gpus[device].compute_capability
                limits = _CUDA_LIMITS.get(op, "as its package says")
                if not any(doctor_gpu.runs_on(arch, capability) for arch in plugin["cuda_archs"]):
                    built = ", ".join(f"sm_{arch}" for arch in plugin["cuda_archs"])
                    reason = f"kernels for {built}, compute capability {dotted(capability, 10)}"
            found.append({"op": op, "device": device, "runs": not reason, "reason": reason, "limits": limits})
    return found


def _targets(runtime: dict[str, Any]) -> list[dict[str, Any]]:
    """For each op and target: does this onnxruntime run what was fused for it?"""
    found = []
    for target in targets.TARGETS:
        for op in OPS:
            why = targets.refusal(op, target, runtime["version"]) if runtime["version"] else None
            reason = (why.reason if why else "") if runtime["version"] else "there is no onnxruntime"
            found.append({"target": target, "op": op, "runs": not reason, "reason": reason})
    return found


def _text(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def render(findings: dict[str, Any], out: Console) -> None:
    """Print the findings, then the problems with their next steps, then the verdict."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for label, value in _lines(findings):
        table.add_row(label, escape(value))
    out.print(table)
    colours = {"error": "red", "warning": "yellow", "note": "cyan"}
    for problem in findings["problems"]:
        level = f"[bold {colours[problem['level']]}]{problem['level']}:[/]"
        out.print(f"{level} {escape(problem['message'])}", soft_wrap=True)  # one line: people search for it
        out.print(f"  next: {escape(problem['next'])}", soft_wrap=True)
    verdict = findings["verdict"]
    colour = "green" if verdict["exit_code"] == 0 else "red"
    out.print(f"[bold {colour}]{escape(verdict['text'])}[/]", soft_wrap=True)
    if verdict["next"]:
        out.print(f"Next step: {escape(verdict['next'])}", soft_wrap=True)


def _lines(found: dict[str, Any]) -> list[tuple[str, str]]:
    runtime, driver, plugin, cuda = found["onnxruntime"], found["driver"], found["plugin"], found["cuda_ep"]
    lines = [
        ("deltafuse", found["deltafuse"]),
        ("python", f"{found['python']} on {found['platform']}"),
        ("packages", ", ".join(f"{name} {version or 'missing'}" for name, version in found["packages"].items())),
        ("onnxruntime", " ".join(filter(None, (runtime["version"] or "none", runtime["path"])))),
    ]
    if runtime["build"]:
        lines.append(("", runtime["build"]))
    if runtime["providers"]:
        lines.append(("providers", ", ".join(runtime["providers"])))
    for device in runtime["devices"]:
        place = f" at {device['pci_bus_id']}" if device["pci_bus_id"] else ""
        lines.append(("EP device", f"{device['ep']}: {device['type']}{place} ({device['vendor']})"))
    version = driver["version"] or ("unknown version" if driver["loads"] else "none")
    if not driver["present"]:
        version += ", no NVIDIA GPU"
    newest = f", supports CUDA {dotted(driver['cuda'], 1000)}" if driver["cuda"] else ""
    lines.append(("driver", f"{version}{newest}" + (f" ({driver['problem']})" if driver["problem"] else "")))
    for gpu in found["gpus"]:
        memory = f", {gpu['memory_bytes'] / 2**30:.0f} GiB" if gpu["memory_bytes"] else ""
        capability = dotted(gpu["compute_capability"], 10)
        lines.append((f"GPU {gpu['index']}", f"{gpu['name']}, {capability}, {gpu['pci_bus_id']}{memory}"))
    lines.append(
        ("CUDA EP", f"{cuda['form']} {cuda['library']}".strip() + (f": {cuda['reason']}" * bool(cuda["reason"])))
    )
    lines += _plugin_lines(plugin)
    for entry in found["ops"]:
        answer = f"has a kernel ({entry['limits']})" if entry["runs"] else f"has no kernel: {entry['reason']}"
        lines.append(("op", f"{entry['op']} on {entry['device']}: {answer}"))
    for entry in found["targets"]:
        answer = "runs here" if entry["runs"] else f"does not run here: {entry['reason']}"
        lines.append(("target", f"{entry['target']}: {entry['op']} {answer}"))
    return lines


def _plugin_lines(plugin: dict[str, Any]) -> list[tuple[str, str]]:
    where = f"{plugin['library']} ({plugin['source']})" if plugin["library"] else "no library"
    lines = [("plugin", where)]
    if plugin["library"] is None:
        return lines + [("", f"looked for {path}") for path in plugin["searched"]]
    if plugin["version"]:
        archs = ", ".join(f"sm_{arch}" for arch in plugin["cuda_archs"]) or "none"
        runtime = f"; CUDA runtime {dotted(plugin['cuda_runtime'], 1000)}" if plugin["cuda_runtime"] else ""
        headers = (plugin["build"] or {}).get("ort_headers", "") if plugin["source"] == "package" else ""
        headers = f"; ONNX Runtime's headers from: {headers}" if headers else ""
        lines.append(("built for", f"deltafuse {plugin['version']}; CUDA kernels: {archs}{runtime}{headers}"))
    if plugin["cuda"]:
        lines.append(("", f"CUDA: {plugin['cuda']}"))
    names = ", ".join(f"{device['name']} ({device['vendor']})" for device in plugin["devices"]) or "none"
    lines.append(("loads", f"yes; devices: {names}" if plugin["loads"] else f"no: {plugin['problem']}"))
    return lines
