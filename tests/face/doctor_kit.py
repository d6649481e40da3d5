"""A machine for the doctor to look at: stand-in libraries from the C compiler, and a stub of onnxruntime."""

from __future__ import annotations

import shutil
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from deltafuse import doctor_gpu
from deltafuse.cli import app
from deltafuse.cli_doctor import examine
from deltafuse.discovery import EP_NAME
from typer.testing import CliRunner

COMPILER = shutil.which("gcc") or shutil.which("cc")
BUS_ID = "0000:41:00.0"

runner = CliRunner()
#: The messages that the tests have produced.
SEEN: list[str] = []

PLUGIN = """
const char* deltafuse_version(void) {{ return "0.1.0"; }}
const char* deltafuse_cuda_archs(void) {{ return "{archs}"; }}
const char* deltafuse_cuda_status(void) {{ return "{status}"; }}
const char* deltafuse_refusals(const char* tag) {{ (void)tag; return "[]"; }}
int deltafuse_cuda_runtime_version(void) {{ return {runtime}; }}
"""
DRIVER = """
#include <stddef.h>
#include <string.h>
int cuInit(unsigned flags) {{ (void)flags; return {init}; }}
int cuDriverGetVersion(int* version) {{ *version = {cuda}; return 0; }}
int cuDeviceGetCount(int* count) {{ *count = 1; return 0; }}
int cuDeviceGet(int* device, int ordinal) {{ *device = ordinal + 7; return 0; }}
int cuDeviceGetName(char* name, int size, int device) {{ strncpy(name, "Stand-in GPU", size); return device != 7; }}
int cuDeviceGetAttribute(int* value, int which, int device) {{
  *value = which == 75 ? {capability} / 10 : which == 76 ? {capability} % 10 : -1;
  return device != 7;
}}
int cuDeviceGetPCIBusId(char* id, int size, int device) {{ strncpy(id, "{bus_id}", size); return device != 7; }}
int cuDeviceTotalMem_v2(size_t* bytes, int device) {{ *bytes = (size_t)80 << 30; return device != 7; }}
int cuGetErrorString(int code, const char** text) {{ *text = "stand-in error"; return code == 0; }}
"""


def compile_library(path: Path, source: str, *flags: str) -> Path:
    """A shared library from C source."""
    if COMPILER is None:
        pytest.skip("there is no C compiler")
    path.parent.mkdir(parents=True, exist_ok=True)
    text = path.with_suffix(".c")
    text.write_text(source)
    subprocess.run([COMPILER, "-shared", "-fPIC", str(text), "-o", str(path), *flags], check=True, capture_output=True)
    return path


def linked_with(path: Path, *names: str, source: str = "int stand_in;") -> Path:
    """A library that is linked with others which are then not there any more."""
    folder = path.parent / "gone"
    others = [compile_library(folder / name, "int other;", f"-Wl,-soname,{name}") for name in names]
    made = compile_library(path, source, "-Wl,--no-as-needed", *map(str, others))
    shutil.rmtree(folder, ignore_errors=True)
    return made


class Machine:
    """Everything that the doctor asks. A GPU machine on which all is well, until a test breaks a part of it."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder, self.patch = folder, patch
        self.ep_devices: list[Any] = []
        self.serves = ["cpu", "cuda:0"]
        self.refuses = ""
        for name in ("ORT_CUDA_PLUGIN_EP_PATH", "DELTAFUSE_LIBRARY"):
            patch.delenv(name, raising=False)
        patch.setattr(doctor_gpu, "ROOT", folder / "root")
        self.smi("exit 9")
        self.gpu_on_the_bus()
        self.ort = self.onnxruntime()
        self.plugin()
        self.driver()

    def plugin(self, archs: str = "80;90a", status: str = "", runtime: int = 13000) -> Path:
        source = PLUGIN.format(archs=archs, status=status, runtime=runtime)
        number = len(list(self.folder.glob("plugin*")))  # a path is loaded once in a process
        library = compile_library(self.folder / f"plugin{number}" / "libdeltafuse_ep.so", source)
        self.patch.setenv("DELTAFUSE_EP_PATH", str(library))
        return library

    def driver(self, cuda: int = 13020, capability: int = 90, init: int = 0) -> Path:
        source = DRIVER.format(cuda=cuda, capability=capability, init=init, bus_id=BUS_ID)
        number = len(list(self.folder.glob("driver*")))
        library = compile_library(self.folder / f"driver{number}" / "libcuda.so.1", source)
        self.patch.setattr(doctor_gpu, "DRIVER_LIBRARY", str(library))
        return library

    def no_driver(self) -> None:
        self.patch.setattr(doctor_gpu, "DRIVER_LIBRARY", "libcuda_that_is_not_there.so.1")

    def smi(self, script: str) -> None:
        """An nvidia-smi on the PATH."""
        tool = self.folder / "bin" / "nvidia-smi"
        tool.parent.mkdir(exist_ok=True)
        tool.write_text(f"#!/bin/sh\n{script}\n")
        tool.chmod(0o755)
        self.patch.setenv("PATH", str(tool.parent), prepend=":")

    def gpu_on_the_bus(self) -> None:
        device = self.folder / "root/sys/bus/pci/devices" / BUS_ID
        device.mkdir(parents=True)
        (device / "vendor").write_text("0x10de\n")
        (device / "class").write_text("0x030200\n")
        version = self.folder / "root/proc/driver/nvidia/version"
        version.parent.mkdir(parents=True)
        version.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\n")

    def no_gpu(self) -> None:
        shutil.rmtree(self.folder / "root")
        self.no_driver()
        self.serves = ["cpu"]

    def onnxruntime(self, version: str = "1.32.0", *, classic: bool = True, plugin_build: bool = False) -> Any:
        """A stub in the place of onnxruntime."""
        stub: Any = types.ModuleType("onnxruntime")
        package = self.folder / "site" / "onnxruntime"
        (package / "capi").mkdir(parents=True, exist_ok=True)
        stub.__version__, stub.__file__ = version, str(package / "__init__.py")
        stub.get_build_info = lambda: "ORT Build Info: build type=Release" + ", cuda-plugin-ep=1" * plugin_build
        names = ["CUDAExecutionProvider"] * (classic and not plugin_build) + ["CPUExecutionProvider"]
        stub.get_available_providers = lambda: names + sorted({device.ep_name for device in self.ep_devices})
        stub.get_ep_devices = lambda: list(self.ep_devices)
        stub.register_execution_provider_library = self.register
        self.patch.setitem(sys.modules, "onnxruntime", stub)
        self.ort = stub
        return stub

    def register(self, name: str, path: str) -> None:
        if self.refuses:
            raise RuntimeError(self.refuses)
        self.add_devices(EP_NAME, str(path), self.serves)

    def add_devices(self, ep_name: str, library: str, names: list[str]) -> None:
        for name in names:
            kind = "CPU" if name == "cpu" else "GPU"
            place = {} if name == "cpu" else {"pci_bus_id": BUS_ID}
            device = types.SimpleNamespace(type=f"OrtHardwareDeviceType.{kind}", vendor="maker", metadata=place)
            metadata = {"library_path": library, "deltafuse_device": name}
            self.ep_devices.append(types.SimpleNamespace(ep_name=ep_name, ep_metadata=metadata, device=device))

    def classic_library(self, *missing: str, source: str = "int stand_in;") -> Path:
        """The classic provider's file, linked with libraries that are not there."""
        path = self.folder / "site/onnxruntime/capi/libonnxruntime_providers_cuda.so"
        return linked_with(path, *missing, source=source)

    def look(self) -> dict[str, Any]:
        return examine()


def only(found: dict[str, Any], name: str) -> dict[str, str]:
    """The one problem, which also is in what people read, with its next step."""
    assert [problem["id"] for problem in found["problems"]] == [name], found["problems"]
    problem: dict[str, str] = found["problems"][0]
    SEEN.append(problem["message"])
    assert problem["message"] and problem["next"]
    text = " ".join(runner.invoke(app, ["doctor"], env={"COLUMNS": "400"}).stdout.split())
    assert f"{problem['level']}: {problem['message']}" in text and f"next: {problem['next']}" in text
    if problem["level"] != "note":
        assert found["verdict"]["next"] == problem["next"]
    return problem
