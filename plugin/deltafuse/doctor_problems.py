"""What is wrong in the doctor's findings, one line each with the next step, and the verdict."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

from .cuda_ep import CUDA_EP, PATH_VARIABLE
from .doctor_gpu import dotted, runs_on

Findings = dict[str, Any]

_AGAIN = "in a checkout of deltafuse: pip install --force-reinstall ."


@dataclass(frozen=True)
class Problem:
    """One line of the doctor.

    Attributes:
        id: a fixed name for programs.
        level: "error": a fused model does not run on the plugin's kernels; "warning": not on the GPU, or not as fast as
            it could; "note": good to know.
        message: what was found.
        next: what to do about it.
    """

    id: str
    level: Literal["error", "warning", "note"]
    message: str
    next: str


def problems(found: Findings) -> list[dict[str, str]]:
    """All problems, in the order in which they are best solved."""
    parts = (_runtime, _library, _driver, _gpus, _cuda_ep)
    return [asdict(problem) for part in parts for problem in part(found)]


def verdict(found: Findings) -> dict[str, Any]:
    """Where the calls of a fused model would run on this machine.

    Returns:
        ``runs``: "cuda", "cpu" (both by the plugin's kernels), "fallback" (by onnxruntime's own op or the ONNX body) or
        "nothing"; ``text``: a sentence; ``next``: the next step, "" where there is none; ``exit_code``: 0 for "cuda"
        and "cpu", else 1.
    """
    runs, text = _where(found)
    order = {"error": 0, "warning": 1, "note": 2}
    pressing = sorted((line for line in found["problems"] if line["level"] != "note"), key=lambda x: order[x["level"]])
    step = pressing[0]["next"] if pressing else ""
    return {"runs": runs, "text": text, "next": step, "exit_code": 0 if runs in ("cuda", "cpu") else 1}


def _where(found: Findings) -> tuple[str, str]:
    if not found["onnxruntime"]["usable"]:
        return "nothing", "No model runs here: there is no onnxruntime that deltafuse can use."
    if not found["plugin"]["loads"]:
        return "fallback", "Fused models run here, but only by ONNX Runtime's own ops or their ONNX bodies: no plugin."
    device = _auto_device(found)
    taken = [op for op in found["ops"] if op["device"] == device and op["runs"]]
    if not taken:
        return "fallback", f"Fused models run here, but by fallback only: the plugin has no kernel for {device}."
    if device.startswith("cuda:"):
        return "cuda", f"Fused models run on the plugin's kernels, on {device}."
    aside = "; the GPU is left alone" if found["driver"]["present"] else ""
    return "cpu", f"Fused models run on the plugin's kernels, on the CPU{aside}."


def _auto_device(found: Findings) -> str:
    """What ``deltafuse.session(model)`` would choose."""
    served = sorted(entry["name"] for entry in found["plugin"]["devices"] if entry["name"].startswith("cuda:"))
    cuda = found["cuda_ep"]
    return served[0] if served and cuda["form"] != "none" and not cuda["problem"] else "cpu"


def _runtime(found: Findings) -> Iterator[Problem]:
    runtime, gpu = found["onnxruntime"], found["driver"]["present"]
    wheel = "onnxruntime-gpu" if gpu else "onnxruntime"
    if runtime["version"] is None:
        name = "ort-missing" if runtime["missing"] else "ort-broken"
        text = "is not installed" if runtime["missing"] else "cannot be imported"
        step = f"pip install {wheel}" if runtime["missing"] else f"pip install --force-reinstall {wheel}"
        yield Problem(name, "error", f"onnxruntime {text}: {runtime['problem']}", step)
    elif not runtime["usable"]:
        yield Problem("ort-old", "error", runtime["problem"], f"pip install -U {wheel}")
    if len(runtime["wheels"]) > 1:
        text = f"two onnxruntime wheels are installed over one another: {', '.join(sorted(runtime['wheels']))}"
        step = f"pip uninstall {' '.join(sorted(runtime['wheels']))}, then pip install {wheel}"
        yield Problem("ort-two-wheels", "warning", text, step)


def _library(found: Findings) -> Iterator[Problem]:
    plugin = found["plugin"]
    if plugin["library"] is None:
        explicit = "there is no such file" in plugin["problem"]
        step = (
            "correct that path, or unset it to use the installed library"
            if explicit
            else f"install a C++ compiler (apt-get install g++), then {_AGAIN}"
        )
        yield Problem("no-library", "error", plugin["problem"], step)
        return
    if plugin["damage"]:
        yield Problem("library-damaged", "error", plugin["damage"], f"copy it again, or {_AGAIN}")
        return
    if plugin["wrong_machine"]:
        text = f"{plugin['wrong_machine']}; the loader says: {plugin['loader']}"
        yield Problem("library-architecture", "error", text, f"build it on this machine; {_AGAIN}")
        return
    if plugin["loader"]:
        missing = ", ".join(entry["library"] for entry in plugin["missing"])
        step = (
            f"install what provides {missing}, or put its folder on LD_LIBRARY_PATH"
            if missing
            else f"build it on this machine; {_AGAIN}"
        )
        yield Problem("library-load", "error", f"the library does not load: {plugin['loader']}", step)
        return
    if plugin["registered_from"]:
        text = f"the EP is already registered in onnxruntime, from {plugin['registered_from']}, not {plugin['library']}"
        yield Problem("already-registered", "warning", text, "deltafuse.unregister() first, or use that library's path")
    elif plugin["name_taken"]:
        step = "onnxruntime.unregister_execution_provider_library('deltafuse'), or do not use that name"
        yield Problem("already-registered", "error", plugin["problem"], step)
    elif not plugin["loads"] and found["onnxruntime"]["usable"]:
        yield Problem("library-refused", "error", plugin["problem"], "use a deltafuse and an onnxruntime that fit")


def _driver(found: Findings) -> Iterator[Problem]:
    driver, plugin = found["driver"], found["plugin"]
    if not driver["present"]:
        return
    if not driver["loads"]:
        text = f"there is an NVIDIA GPU, but its driver's library is not found: {driver['problem']}"
        step = "install NVIDIA's driver; in a container: start it with --gpus all (NVIDIA_DRIVER_CAPABILITIES=compute)"
        yield Problem("cuda-driver-missing", "warning", text, step)
        return
    have, need = driver["cuda"], plugin["cuda_runtime"]
    if (have and need and have // 1000 < need // 1000) or "driver version is insufficient" in plugin["cuda"]:
        has = f"CUDA {dotted(have, 1000)}" if have else "an older CUDA"
        needs = f"CUDA {dotted(need, 1000)}" if need else "a newer CUDA"
        text = f"the driver {driver['version']} is too old: it supports {has}, the plugin was built with {needs}"
        step = "update NVIDIA's driver, or build deltafuse with an older CUDA toolkit"
        yield Problem("cuda-driver-old", "warning", " ".join(text.split()), step)
    elif driver["problem"]:
        step = "see nvidia-smi; a reboot or CUDA_VISIBLE_DEVICES may be what it needs"
        yield Problem("cuda-driver-fails", "warning", f"the driver does not work: {driver['problem']}", step)


def _gpus(found: Findings) -> Iterator[Problem]:
    plugin = found["plugin"]
    if plugin["library"] is None or not plugin["version"] or not found["driver"]["present"]:
        return
    archs = plugin["cuda_archs"]
    if not archs:
        note = plugin["build"]["cuda_note"] if plugin["build"] else ""
        text = "there is an NVIDIA GPU, but the library has no CUDA kernels" + (f": {note}" if note else "")
        step = f"pip install nvidia-cuda-nvcc nvidia-cuda-cccl, then with DELTAFUSE_CUDA=ON {_AGAIN}"
        yield Problem("no-cuda-kernels", "warning", text, step)
        return
    for gpu in found["gpus"]:
        capability = gpu["compute_capability"]
        if not any(runs_on(arch, capability) for arch in archs):
            built = ", ".join(f"sm_{arch}" for arch in archs)
            text = (
                f"GPU {gpu['index']} ({gpu['name']}) has compute capability {dotted(capability, 10)}: "
                f"the library has kernels for {built}"
            )
            step = (
                f"with DELTAFUSE_CUDA=ON DELTAFUSE_CUDA_ARCHS={_arch(capability)} {_AGAIN}"
                if capability >= 80
                else "use a GPU of compute capability 8.0 or newer, or device='cpu'"
            )
            yield Problem("gpu-unsupported", "warning", text, step)


def _arch(capability: int) -> str:
    """What to build for a compute capability: the kernels for 9.0 use what only it has."""
    return "90a" if capability == 90 else str(capability)


def _cuda_ep(found: Findings) -> Iterator[Problem]:
    cuda, runtime = found["cuda_ep"], found["onnxruntime"]
    if not runtime["usable"]:
        return
    if cuda["file_missing"]:
        text = f"{PATH_VARIABLE} is {cuda['library']}: there is no such file"
        yield Problem("cuda-plugin-missing", "warning", text, f"correct {PATH_VARIABLE}, or unset it")
    elif cuda["form"] == "none" and found["driver"]["present"]:
        text = f"there is an NVIDIA GPU, but this onnxruntime has no {CUDA_EP}"
        step = "pip uninstall onnxruntime, then pip install onnxruntime-gpu"
        yield Problem("no-cuda-ep", "warning", text, step)
    if found["driver"]["present"] and found["driver"]["loads"]:
        for entry in cuda["missing"]:
            title = "cuDNN" if "cudnn" in entry["library"] else "cuBLAS" if "cublas" in entry["library"] else "CUDA"
            needs = f"onnxruntime's {CUDA_EP} needs {entry['library']}"
            text = f"{title} is missing: {needs}; the loader says: {entry['why']}"
            step = (
                f"pip install {_wheel(entry['library'])} and import torch or call onnxruntime.preload_dlls() first, "
                "or put its folder on LD_LIBRARY_PATH"
            )
            yield Problem("cuda-library-missing", "warning", text, step)
    if cuda["form"] == "plugin" and not cuda["file_missing"]:
        text = f"another CUDA plugin is present and used: {cuda['library'] or 'a registered one'} ({cuda['reason']})"
        step = f"nothing; to use another, set or unset {PATH_VARIABLE}"
        yield Problem("other-cuda-plugin", "note", text, step)
    for other in cuda["unused"]:
        step = f"nothing; to use a plugin, set {PATH_VARIABLE} to its path"
        yield Problem("other-cuda-plugin", "note", f"another CUDA EP is present and not used: {other}", step)


def _wheel(library: str) -> str:
    """The wheel of a CUDA library: libcublas.so.13 is in nvidia-cublas, libcublas.so.12 in nvidia-cublas-cu12."""
    name = library.removeprefix("lib").partition(".so")[0]
    package = {"cublasLt": "cublas", "nvrtc": "cuda-nvrtc", "cudart": "cuda-runtime"}.get(name, name)
    major = library.rpartition(".")[2]
    if name == "cudnn":
        return "nvidia-cudnn-cu13 (or -cu12, as onnxruntime's CUDA is)"
    return f"nvidia-{package}-cu12" if major == "12" else f"nvidia-{package}"
