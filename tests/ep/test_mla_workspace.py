"""What LatentAttention's CUDA side decides on the host, without a GPU. Needs CUDA's and ONNX Runtime's C headers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
COMPILER = shutil.which("c++") or shutil.which("g++")


def header_folder(header: str, named: str, *places: Path) -> Path | None:
    """The folder of a header: what the environment names, else the first place that has it."""
    candidates = [Path(os.environ[named])] if named in os.environ else list(places)
    return next((folder for folder in candidates if (folder / header).is_file()), None)


def cuda_include() -> Path | None:
    nvcc = shutil.which("nvcc")
    toolkit = [Path(nvcc).resolve().parents[1] / "include"] if nvcc else []
    wheels = sorted(Path(sysconfig.get_paths()["purelib"]).glob("nvidia/*/include"))
    return header_folder("cuda_runtime_api.h", "CUDA_INCLUDE_DIR", *toolkit, Path("/usr/local/cuda/include"), *wheels)


def ort_include() -> Path | None:
    header = "onnxruntime_ep_c_api.h"
    built = [path.parent for path in (ROOT / "build").rglob(header)]  # where an earlier build has put them
    return header_folder(header, "ORT_INCLUDE_DIR", *built, Path("/usr/include/onnxruntime"))


def test_workspace_and_path(tmp_path: Path) -> None:
    cuda, ort = cuda_include(), ort_include()
    if COMPILER is None or cuda is None or ort is None:
        pytest.skip(f"compiler {COMPILER}, CUDA's headers {cuda}, ONNX Runtime's headers {ort}: all three are needed")
    program = tmp_path / "check"
    sources = [str(HERE / "mla_workspace_check.cc")]
    sources += [str(ROOT / "plugin" / "ep" / f"{name}.cc") for name in ("mla_binding", "attributes", "operands")]
    includes = [f"-I{ROOT}", "-isystem", str(cuda), "-isystem", str(ort)]
    made = subprocess.run(
        [COMPILER, "-std=c++17", "-O1", "-Wall", *includes, *sources, "-o", str(program)],
        capture_output=True,
        text=True,
    )
    assert made.returncode == 0, made.stderr[-3000:]
    done = subprocess.run([str(program)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout
