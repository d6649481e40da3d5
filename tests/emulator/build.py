"""Builds the emulator and what runs on it.

``python tests/emulator/build.py OP [TREE]`` prints the path of the library of an op (kda, mla or moe), made for
the emulator from this checkout or another.

Everything lies in build/emulator, and is compiled again only after a change of it or of what it includes.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
BUILD = HERE.parents[1] / "build" / "emulator"
CUDA = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "include"
# The text of the kernels, and not the machine code of any GPU.
NVCC = [
    *("nvcc", "-std=c++17", "-O3", "-lineinfo", "-gencode", "arch=compute_90a,code=compute_90a", "-cudart", "none"),
    *("-Xfatbin", "-compress=false", "-Xcompiler", "-fPIC"),
]
HOST = ["g++", "-std=c++17", "-O2", "-g", "-fPIC", "-isystem", str(CUDA)]


def emulator() -> Path:
    """The emulator's library, which stands in for the CUDA runtime."""
    make = ["make", "--silent", "-j2", "-C", str(HERE), f"BUILD={BUILD}", f"CUDA_INCLUDE={CUDA}"]
    subprocess.run(make, check=True, stdout=sys.stderr)
    return BUILD / "libemulated_cudart.so"


def key_of(source: Path) -> str:
    """Of a file's text and of that of all it includes in quotation marks."""
    seen: set[Path] = set()
    queue = [source.resolve()]
    while queue:
        path = queue.pop()
        if path in seen or not path.is_file():
            continue
        seen.add(path)
        names = re.findall(r'^\s*#\s*include\s*"([^"]+)"', path.read_text(), re.M)
        queue += [(path.parent / name).resolve() for name in names]
    digest = hashlib.sha256()
    for path in sorted(seen, key=lambda path: path.name):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:24]


def compile_one(source: Path) -> Path:
    """The object of a .cu or .cc file."""
    target = BUILD / "objects" / f"{source.name}.{key_of(source)}.o"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_suffix(f".{os.getpid()}")
        command = NVCC if source.suffix == ".cu" else HOST
        subprocess.run([*command, "-c", str(source), "-o", str(part)], check=True, stdout=sys.stderr)
        part.rename(target)
    return target


def link(objects: Sequence[Path], target: Path) -> Path:
    """A shared library that finds the emulator where it was built."""
    part = target.with_suffix(f".{os.getpid()}")
    search = [f"-L{BUILD}", "-lemulated_cudart", f"-Wl,-rpath,{BUILD}", "-Wl,--no-undefined"]
    subprocess.run(["g++", "-shared", "-o", str(part), *map(str, objects), *search], check=True)
    part.rename(target)
    return target


def library(op: str, tree: Path) -> Path:
    """The kernels of an op with their host code and C face."""
    emulator()
    folder, common = tree / "custom_ops" / op, tree / "custom_ops" / "common"
    sources = [*folder.glob("*.cu"), *common.glob("*_cuda.cc"), *folder.glob("*_cuda.cc"), *folder.glob("*_cuda_*.cc")]
    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compile_one, sorted(sources)))
    return link(objects, BUILD / f"lib{op}_{hashlib.sha256(str(tree).encode()).hexdigest()[:8]}.so")


if __name__ == "__main__":
    print(library(sys.argv[1], Path(sys.argv[2] if len(sys.argv) > 2 else HERE.parents[1]).resolve()))
