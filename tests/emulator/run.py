"""Runs an op's GPU tests on the emulator, with the kernels of this checkout or another.

    python tests/emulator/run.py moe -k "test_configurations and bfloat16"
    python tests/emulator/run.py moe --tree ../other -x
    EMU_LATE=1 EMU_RACES=1 python tests/emulator/run.py mla --sanitize

Arguments that are not named here are pytest's. ``--sanitize`` runs the small grid of ``tests/gpu/sanitize_<op>.py``.
Needs PyTorch (for CPUs will do) besides what the emulator's own tests need. Switches: README.md.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from emulator import build


def package_of(tree: Path) -> Path:
    """A folder with deltafuse as the tree has it; the package is in four places there."""
    folder = Path(tempfile.mkdtemp(prefix="emulator"))
    package = folder / "deltafuse"
    package.mkdir()
    parts = [
        *(tree / "plugin" / "deltafuse").iterdir(),
        *(tree / name for name in ("fusions", "custom_ops", "registry")),
    ]
    for part in parts:
        if part.suffix != ".so":
            (package / part.name).symlink_to(part)
    return folder


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("op", choices=("kda", "mla", "moe"))
    parser.add_argument("--tree", type=Path, default=build.HERE.parents[1])
    parser.add_argument("--sanitize", action="store_true")
    options, rest = parser.parse_known_args()
    tree = options.tree.resolve()
    environment = dict(os.environ, OMP_NUM_THREADS="1")
    environment[f"DELTAFUSE_{options.op.upper()}_LIBRARY"] = str(build.library(options.op, tree))
    path = [str(package_of(tree)), str(build.HERE.parent), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(part for part in path if part)
    if options.sanitize:
        script = tree / "tests" / "gpu" / f"sanitize_{options.op}.py"
        code = f"import emulator.emulated_cuda, runpy; runpy.run_path({str(script)!r}, run_name='__main__')"
        command = [sys.executable, "-c", code]
    else:
        tests = f"tests/gpu/test_{options.op}_cuda.py"
        plugins = ["-p", "emulator.emulated_cuda", "-p", "no:cacheprovider"]
        command = [sys.executable, "-m", "pytest", "-q", *plugins, tests, *rest]
    os.chdir(tree)
    os.execve(sys.executable, command, environment)


if __name__ == "__main__":
    raise SystemExit(main())
