"""The NVIDIA driver and GPUs of this machine, as its own library, ``nvidia-smi`` and the kernel tell them.

Nothing here needs a CUDA package, and nothing is raised: what cannot be asked is left empty, with the reason.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

#: The driver's library. Tests put another in its place.
DRIVER_LIBRARY = "libcuda.so.1"
#: Where the kernel's files begin. Tests put another in its place.
ROOT = Path("/")

_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76  # CUdevice_attribute
_NVIDIA, _DISPLAY = "0x10de", "0x03"


@dataclass(frozen=True)
class Gpu:
    """One GPU: CUDA ordinal, name, compute capability (90 for 9.0), PCI bus id, bytes of memory."""

    index: int
    name: str
    compute_capability: int
    pci_bus_id: str = ""
    memory_bytes: int = 0


@dataclass(frozen=True)
class Driver:
    """The driver.

    Attributes:
        version: the kernel module's, such as "580.65.06"; "" where unknown.
        cuda: the newest CUDA that it supports, such as 13000; 0 where unknown.
        problem: why the driver's library cannot be used, its own message or the loader's; "" where it can.
        loads: does the loader find the library?
        gpus: what CUDA sees, or ``nvidia-smi`` where CUDA cannot be asked.
        pci: bus ids of NVIDIA GPUs that the kernel sees, with or without a driver.
    """

    version: str = ""
    cuda: int = 0
    problem: str = ""
    loads: bool = False
    gpus: tuple[Gpu, ...] = ()
    pci: tuple[str, ...] = field(default=())

    @property
    def present(self) -> bool:
        """Is there an NVIDIA GPU at all?"""
        return bool(self.gpus or self.pci)


def probe() -> Driver:
    """Ask this machine."""
    version, listed = _smi()
    version = version or _kernel_version()
    pci = _pci()
    try:
        driver = ctypes.CDLL(DRIVER_LIBRARY)
    except OSError as error:
        return Driver(version=version, problem=str(error), gpus=tuple(listed), pci=pci)
    number, cuda = ctypes.c_int(), 0
    try:
        if driver.cuDriverGetVersion(ctypes.byref(number)) == 0:
            cuda = number.value
        problem = _error(driver, "cuInit", driver.cuInit(0))
        gpus = [] if problem else _gpus(driver)
    except (AttributeError, RuntimeError) as error:
        problem, gpus = str(error), []
    return Driver(version, cuda, problem, True, tuple(gpus or listed), pci)


def runs_on(arch: str, compute_capability: int) -> bool:
    """Does machine code for an architecture run there? "90a" on 9.0 alone, "80" on 8.0 and later 8.x."""
    found = re.fullmatch(r"(\d+)([a-z]?)", arch)
    if found is None:
        return False
    number = int(found[1])
    if found[2] == "a":
        return number == compute_capability
    return number // 10 == compute_capability // 10 and number <= compute_capability


def dotted(number: int, unit: int) -> str:
    """A version or compute capability with its dot: (13020, 1000) is 13.2, (90, 10) is 9.0."""
    minor = number % unit
    return f"{number // unit}.{minor // 10 if unit == 1000 else minor}"


def _error(driver: Any, call: str, code: int) -> str:
    if code == 0:
        return ""
    text = ctypes.c_char_p()
    try:
        driver.cuGetErrorString(code, ctypes.byref(text))
    except AttributeError:
        pass
    return f"{call} failed with CUDA error {code}" + (f" ({text.value.decode()})" if text.value else "")


def _gpus(driver: Any) -> list[Gpu]:
    """The GPUs, each asked through its handle: no context is made."""

    def check(call: str, *arguments: Any) -> None:
        problem = _error(driver, call, getattr(driver, call)(*arguments))
        if problem:
            raise RuntimeError(problem)

    count, handle = ctypes.c_int(), ctypes.c_int()
    check("cuDeviceGetCount", ctypes.byref(count))
    found = []
    for index in range(count.value):
        name, bus = ctypes.create_string_buffer(256), ctypes.create_string_buffer(32)
        major, minor, memory = ctypes.c_int(), ctypes.c_int(), ctypes.c_size_t()
        check("cuDeviceGet", ctypes.byref(handle), index)
        check("cuDeviceGetName", name, len(name), handle)
        check("cuDeviceGetAttribute", ctypes.byref(major), _CAPABILITY_MAJOR, handle)
        check("cuDeviceGetAttribute", ctypes.byref(minor), _CAPABILITY_MINOR, handle)
        check("cuDeviceGetPCIBusId", bus, len(bus), handle)
        check("cuDeviceTotalMem_v2", ctypes.byref(memory), handle)
        capability = 10 * major.value + minor.value
        found.append(Gpu(index, name.value.decode("utf-8", "replace"), capability, bus.value.decode(), memory.value))
    return found


def _smi() -> tuple[str, list[Gpu]]:
    """The driver's version and the GPUs as ``nvidia-smi`` lists them."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return "", []
    query = "--query-gpu=driver_version,index,name,compute_cap,pci.bus_id,memory.total"
    try:
        done = subprocess.run(
            [tool, query, "--format=csv,noheader,nounits"], capture_output=True, text=True, timeout=20, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return "", []
    version, found = "", []
    for line in done.stdout.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        numbers = re.fullmatch(r"(\d+)\.(\d+)", cells[3]) if len(cells) == 6 else None
        if numbers is None or not cells[1].isdigit():
            continue
        version = cells[0]
        memory = int(cells[5]) * 1024 * 1024 if cells[5].isdigit() else 0
        found.append(Gpu(int(cells[1]), cells[2], 10 * int(numbers[1]) + int(numbers[2]), cells[4], memory))
    return version, found


def _kernel_version() -> str:
    try:
        text = (ROOT / "proc/driver/nvidia/version").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    found = re.search(r"\s(\d{3}\.\d+(?:\.\d+)?)\s", text)
    return found[1] if found else ""


def _pci() -> tuple[str, ...]:
    """Bus ids of NVIDIA's display and compute devices."""
    found = []
    try:
        devices = sorted((ROOT / "sys/bus/pci/devices").iterdir())
    except OSError:
        return ()
    for device in devices:
        try:
            vendor = (device / "vendor").read_text().strip()
            kind = (device / "class").read_text().strip()
        except OSError:
            continue
        if vendor == _NVIDIA and kind.startswith(_DISPLAY):
            found.append(device.name)
    return tuple(found)
