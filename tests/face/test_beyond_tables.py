"""``bench`` and ``calibrate`` of a model that no length asked for fits: one error in words, and no success."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import pytest
from deltafuse.bench import bench
from deltafuse.calibration import calibrate
from deltafuse.cli import app
from deltafuse.errors import DeltaFuseError
from exports import library
from typer.testing import CliRunner

runner = CliRunner()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Rows of a table with eight of them, one for each token."""
    rows = ", ".join(["0.5"] * 32)
    square = ", ".join(["0.25"] * 16)
    made = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["" : 20]>
        g (float[1, S, 4] x) => (float[1, S, 4] y) <float[8, 4] table = {{{rows}}}, float[4, 4] w = {{{square}}},
            int64 zero = {{0}}, int64 one = {{1}}> {{
            length = Shape (x)
            tokens = Gather (length, one)
            places = Range (zero, tokens, one)
            taken = Gather (table, places)
            mixed = MatMul (x, w)
            y = Add (mixed, taken)
        }}"""
    )
    path = tmp_path / "m.onnx"
    onnx.save(made, path)
    return path


def test_bench_of_nothing_is_an_error(model: Path) -> None:
    with pytest.raises(DeltaFuseError, match="nothing could be run and timed: 9 tokens: cannot be run"):
        bench(model, tokens=[9], targets=["portable"])
    result = runner.invoke(app, ["bench", str(model), "--tokens", "9", "--json"])
    assert result.exit_code == 2
    assert "nothing could be run" in json.dumps(json.loads(result.stdout))


def test_bench_of_some_lengths_is_none(model: Path) -> None:
    done = bench(model, tokens=[5, 9], targets=["portable"], repeats=1)
    assert all(len(variant.timings) == 1 and "9 tokens" in variant.notes[0] for variant in done.variants)


def test_calibrate_says_it_once(model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    arguments = ["calibrate", str(model), "-o", str(tmp_path / "s.npz"), "--samples", "1", "--quiet"]
    assert runner.invoke(app, [*arguments, "--length", "8"]).exit_code == 0
    result = runner.invoke(app, [*arguments, "--length", "9"])
    assert result.exit_code == 2 and "failed" in result.output
    assert "of 9 tokens" in " ".join(result.output.split()) and "give --length" in result.output
    assert capfd.readouterr().err == ""  # ONNX Runtime's own log would be there


def test_calibrate_says_how_many_tokens_went_through(tmp_path: Path) -> None:
    """The default lengths go beyond a table of 64 rows in their steps: the ones to give are said."""
    made = library.export("mla_window_decode").proto()
    path = tmp_path / "m.onnx"
    onnx.save(made, path)
    calibrate(path, tokens=60, steps=4, samples=1)
    with pytest.raises(DeltaFuseError, match=r"64 tokens went through.*--length and --steps.*\(1 and 67 were tried\)"):
        calibrate(path, samples=1)
