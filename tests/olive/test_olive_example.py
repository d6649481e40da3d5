"""The example runs as its head says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from olive_kit import written

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "olive_workflow.py"


def test_example(tmp_path: Path) -> None:
    model = written("glm5_decode", tmp_path)
    command = [sys.executable, str(EXAMPLE), str(model), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("kda ")]
    assert len(lines) == 2 and all(": fused, error" in line for line in lines)
    assert "likeliest next tokens" in done.stdout
