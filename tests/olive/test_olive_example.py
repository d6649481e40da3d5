"""The example runs as its head says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from olive_kit import written

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "olive_workflow.py"


def test_example(tmp_path: Path) -> None:
    model = written("bailing_wrap_decode_dyn_batched", tmp_path)
    command = [sys.executable, str(EXAMPLE), str(model), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    fused = [line.split()[0] for line in done.stdout.splitlines() if ": fused, error" in line]
    assert fused == ["kda", "mla", "moe"]
    assert "likeliest next tokens" in done.stdout
