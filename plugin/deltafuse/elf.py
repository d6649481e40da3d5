"""What a shared library's own headers say: which machine it is for, and which libraries it needs."""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import re
import signal
import struct
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

#: ``e_machine`` of the ELF header -> the name that ``platform.machine()`` gives such a machine.
MACHINES = {
    3: "i686",
    20: "ppc",
    21: "ppc64le",
    22: "s390x",
    40: "armv7l",
    62: "x86_64",
    183: "aarch64",
    243: "riscv64",
}
_SAME = {"amd64": "x86_64", "arm64": "aarch64", "i386": "i686"}

_LOAD, _DYNAMIC = 1, 2  # p_type
_NEEDED, _STRTAB, _RPATH, _RUNPATH = 1, 5, 15, 29  # d_tag
_CUDA = re.compile(r"lib(?:cudnn|cublas|cublasLt|cufft|curand|cudart|nvrtc|cusparse|cuda)\w*\.so(?:\.\d+)*")
#: cuDNN is opened when it is first needed; its name may be put together in code.
_CUDNN = re.compile(rb"libcudnn\.so(?:\.\d+)*")
_CUDNN_NOW = "libcudnn.so.9"


@dataclass(frozen=True)
class Missing:
    """A library that the loader does not find: its name, the loader's own message, and is the file linked with it?"""

    library: str
    why: str
    linked: bool = True


class ElfError(ValueError):
    """The file is not a shared library that this machine could read."""


@dataclass(frozen=True)
class Elf:
    """The headers of a 64-bit little-endian ELF file.

    Attributes:
        machine: what it was compiled for, as ``platform.machine()`` would say it.
        needed: the libraries that it is linked with.
        folders: where it says they are, ``$ORIGIN`` replaced.
    """

    machine: str
    needed: tuple[str, ...]
    folders: tuple[str, ...]


def this_machine() -> str:
    """What this machine is, in the names of :data:`MACHINES`."""
    name = platform.machine()
    return _SAME.get(name.lower(), name)


def read_elf(path: str | os.PathLike[str]) -> Elf:
    """Read a library's headers.

    Raises:
        ElfError: not an ELF file, a truncated one, or one of a kind that is not known here.
        OSError: it cannot be read.
    """
    with open(path, "rb") as file:
        if os.fstat(file.fileno()).st_size < 64:
            raise ElfError("it is not an ELF file")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _parse(data, Path(path).resolve().parent)


def _parse(data: mmap.mmap, folder: Path) -> Elf:
    if data[:4] != b"\x7fELF":
        raise ElfError("it is not an ELF file")
    order = "<" if data[5] == 1 else ">"
    (number,) = struct.unpack_from(order + "H", data, 18)
    machine = MACHINES.get(number, f"machine number {number}")
    if data[4] != 2 or data[5] != 1:  # 32-bit or big-endian: its machine is all that matters
        return Elf(machine, (), ())
    try:
        return Elf(machine, *_dynamic(data, folder))
    except (struct.error, IndexError, ValueError) as error:
        raise ElfError("it is truncated or damaged") from error


def _dynamic(data: mmap.mmap, folder: Path) -> tuple[tuple[str, ...], tuple[str, ...]]:
    (headers,) = struct.unpack_from("<Q", data, 32)
    size, count = struct.unpack_from("<HH", data, 54)
    parts = [struct.unpack_from("<IIQQQQQQ", data, headers + i * size) for i in range(count)]
    if any(kind == _LOAD and offset + length > len(data) for kind, _, offset, _, _, length, _, _ in parts):
        raise ValueError("the file ends before its segments do")
    entries: list[tuple[int, int]] = []
    for kind, _, offset, *_, length, _, _ in parts:
        if kind == _DYNAMIC:
            entries += [struct.unpack_from("<QQ", data, at) for at in range(offset, offset + length, 16)]
    strings = next((value for tag, value in entries if tag == _STRTAB), None)
    if strings is None:
        return (), ()
    start = next(
        strings - address + offset
        for kind, _, offset, address, _, length, _, _ in parts
        if kind == _LOAD and address <= strings < address + length
    )

    def text(at: int) -> str:
        end = data.find(b"\0", start + at)
        if end < 0:
            raise ValueError("no end of a string")
        return data[start + at : end].decode("utf-8", "replace")

    needed = tuple(text(value) for tag, value in entries if tag == _NEEDED)
    paths = ":".join(text(value) for tag, value in entries if tag in (_RPATH, _RUNPATH))
    origin = paths.replace("${ORIGIN}", "$ORIGIN").replace("$ORIGIN", str(folder))
    return needed, tuple(path for path in origin.split(":") if path)


def damage(path: str | os.PathLike[str]) -> str:
    """Why the file is no whole library, "" where it is one. The loader is killed by a signal on a truncated file."""
    try:
        read_elf(path)
    except (ElfError, OSError) as error:
        return f"{path} is no library: {error}"
    return ""


def killed_by_loading(path: str | os.PathLike[str]) -> str:
    """What becomes of a process that loads the file, if that kills it; "" where it lives, or cannot be tried.

    Tried in another process. Damage in the middle of a file shows nowhere in its headers.
    """
    if getattr(sys, "frozen", False) or "python" not in Path(sys.executable or "").name:
        return ""  # a program that has Python inside: started again, it would not take Python's options
    command = [sys.executable, "-I", "-S", "-c", "import ctypes, sys; ctypes.CDLL(sys.argv[1])", os.path.realpath(path)]
    try:
        code = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, timeout=60).returncode
    except (OSError, subprocess.SubprocessError):
        return ""
    if code >= 0:
        return ""
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"{path} is no library: it is damaged, loading it ends the process ({name})"


def wrong_architecture(path: str | os.PathLike[str]) -> str:
    """Why this machine cannot load the file, from its header alone; "" where nothing speaks against it."""
    why = damage(path)
    if why:
        return why
    found, here = read_elf(path), this_machine()
    return "" if found.machine == here else f"{path} is built for {found.machine}, this machine is {here}"


def missing_libraries(path: str | os.PathLike[str]) -> list[Missing]:
    """The libraries that a file is linked with and that the loader does not find.

    Raises:
        ElfError, OSError: as :func:`read_elf`.
    """
    found = read_elf(path)
    return [Missing(name, why) for name in found.needed if (why := _why_not(name, found.folders))]


def missing_cuda_libraries(path: str | os.PathLike[str]) -> list[Missing]:
    """As :func:`missing_libraries`, CUDA's libraries only, and cuDNN also where it is opened later.

    Raises:
        ElfError, OSError: as :func:`read_elf`.
    """
    found = read_elf(path)
    missing = [entry for entry in missing_libraries(path) if _CUDA.fullmatch(entry.library)]
    if any("libcudnn" in name for name in found.needed):
        return missing
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        names = {match.group().decode() for match in _CUDNN.finditer(data)}
        if not names and data.find(b"libcudnn") >= 0:
            names = {_CUDNN_NOW}
    reasons = {name: _why_not(name, found.folders) for name in sorted(names, reverse=True)}
    if reasons and all(reasons.values()):
        missing += [Missing(name, why, linked=False) for name, why in list(reasons.items())[:1]]
    return missing


def _why_not(name: str, folders: tuple[str, ...]) -> str:
    """The loader's message where a library is not found, else ""."""
    if any(os.path.isfile(os.path.join(folder, name)) for folder in folders):
        return ""
    try:
        ctypes.CDLL(name)
    except OSError as error:
        return str(error)
    return ""
