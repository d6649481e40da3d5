"""Packed weights that sessions share: hashes of their contents, and who frees them. Without a GPU."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
COMPILER = shutil.which("c++") or shutil.which("g++")


def compiled(folder: Path, sanitizers: str) -> Path:
    """The program, with sanitizers where the compiler has their libraries."""
    if COMPILER is None:
        pytest.skip("no C++ compiler")
    program = folder / "shared_weights_check"
    sources = [str(HERE / "shared_weights_check.cc"), str(ROOT / "plugin" / "ep" / "shared_weights.cc")]
    command = [COMPILER, "-std=c++17", "-O1", "-g", "-Wall", "-Werror", "-pthread", *sources, "-o", str(program)]
    checked = [*command, f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all"]
    if subprocess.run(checked, capture_output=True).returncode == 0:
        return program
    subprocess.run(command, check=True, capture_output=True)
    return program


def run(program: Path, scenario: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(program), scenario], capture_output=True, text=True, timeout=120, env={})


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory.mktemp("shared"), "address,undefined")


@pytest.mark.parametrize("scenario", ["pieces", "differences", "spread", "sharing", "threads"])
def test_shared_weights(program: Path, scenario: str) -> None:
    done = run(program, scenario)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]


def test_sharing_has_no_races(tmp_path: Path) -> None:
    done = run(compiled(tmp_path, "thread"), "threads")
    if "unexpected memory mapping" in done.stderr:
        pytest.skip("ThreadSanitizer does not run on this kernel")
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
