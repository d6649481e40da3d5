"""The command line: exit codes, one-line errors, clean stdout, help."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import onnx
import pytest
from deltafuse import __version__
from deltafuse.cli import app
from typer.testing import CliRunner

from .kit import FakePipeline

runner = CliRunner()


def command(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run ``deltafuse`` in a process of its own."""
    program = "from deltafuse.cli import main; main()"
    return subprocess.run([sys.executable, "-c", program, *map(str, arguments)], capture_output=True, text=True)


def test_fuse(pipeline: FakePipeline, path: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.onnx"
    result = runner.invoke(app, ["fuse", str(path), "-o", str(out), "--require", "kda=2"])
    assert result.exit_code == 0, result.output
    assert out.exists() and result.stderr == ""
    text = " ".join(result.stdout.split())
    for part in ("3,000 nodes before, 200 after", "3.0e-07 / 2e-05", "absorbed: conv, gate", "fold-shapes"):
        assert part in text, result.stdout
    assert "refused because: output o: relative error" in text
    assert all(len(line) <= 80 for line in result.stdout.splitlines() if "/" not in line)
    assert "\x1b" not in result.stdout


def test_required(pipeline: FakePipeline, path: Path, tmp_path: Path) -> None:
    result = runner.invoke(app, ["fuse", str(path), "-o", str(tmp_path / "out.onnx"), "--require", "kda=3"])
    assert result.exit_code == 1
    assert "required kda=3, fused 2" in result.stderr and "relative error 3.1e-02" in result.stderr
    assert not (tmp_path / "out.onnx").exists()


def test_json_alone_on_stdout(pipeline: FakePipeline, path: Path, tmp_path: Path) -> None:
    result = runner.invoke(app, ["fuse", str(path), "-o", str(tmp_path / "o.onnx"), "--json", "--require", "kda=9"])
    assert result.exit_code == 1
    assert json.loads(result.stdout)["nodes_before"] == 3000


def test_quiet_and_report(pipeline: FakePipeline, path: Path, tmp_path: Path) -> None:
    arguments = ["fuse", str(path), "-o", str(tmp_path / "o.onnx"), "-q", "--report", str(tmp_path / "r.json")]
    result = runner.invoke(app, arguments)
    assert result.exit_code == 0 and result.output == ""
    assert json.loads((tmp_path / "r.json").read_text())["target"] == "plugin"


def test_python_runs_it_as_a_module() -> None:
    done = subprocess.run([sys.executable, "-m", "deltafuse", "version"], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == __version__


def test_dry_run_and_inspect(pipeline: FakePipeline, path: Path, tmp_path: Path) -> None:
    for arguments in (["fuse", str(path), "--dry-run"], ["inspect", str(path)]):
        result = runner.invoke(app, arguments)
        assert result.exit_code == 0 and "nothing changed (dry run)" in result.stdout, result.output
        assert "recognised" in result.stdout and "refused because" in result.stdout
    assert [p.name for p in tmp_path.iterdir()] == ["in.onnx"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["fuse", "{path}"], "give -o OUT.onnx"),
        (["fuse"], "Missing argument"),
        (["fuse", "{path}", "-o", "o.onnx", "--require", "kda"], "expected OP=COUNT"),
        (["fuse", "{path}", "-o", "{tmp}/o.onnx", "--require", "abc=1"], "expected an op among kda"),
        (["fuse", "{path}", "-o", "{tmp}/o.onnx", "--target", "cuda"], "expected one of plugin, portable"),
        (["fuse", "{path}", "-o", "{tmp}/o.onnx", "--proof-memory", "much"], "expected a size"),
        (["fuse", "{path}", "-o", "{tmp}"], "is a directory"),
        (["fuse", "{tmp}/absent.onnx", "-o", "{tmp}/o.onnx"], "no such file"),
        (["inspect", "{tmp}"], "is a directory"),
        (["fuse", "{path}", "-o", "-"], "models are not written to standard output"),
        (["fuse", "{path}", "-o", "{tmp}/o.onnx", "--report", "-"], "--json prints the report"),
        (["inspect", "{path}", "--report", "-"], "--json prints the report"),
        (["fuse", "{path}", "-o", "{tmp}/o.onnx", "--require", "kda=1", "--require", "kda=0"], "contradict each other"),
        (["nonsense"], "No such command"),
    ],
)
def test_bad_usage(pipeline: FakePipeline, path: Path, tmp_path: Path, arguments: list[str], expected: str) -> None:
    result = runner.invoke(app, [a.format(path=path, tmp=tmp_path) for a in arguments])
    assert result.exit_code == 2
    assert expected in " ".join(result.output.replace("│", " ").split()) and "Traceback" not in result.output
    assert pipeline.calls == []


def test_unexpected_errors_are_one_line(pipeline: FakePipeline, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline.error = RuntimeError("something [odd]\nhappened")
    result = runner.invoke(app, ["inspect", str(path)])
    assert result.exit_code == 3 and result.stdout == ""
    assert "unexpected RuntimeError: something [odd] happened" in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    monkeypatch.setenv("DELTAFUSE_TRACEBACK", "1")
    assert "Traceback" in runner.invoke(app, ["inspect", str(path)]).stderr


def test_bad_files_in_a_process(tmp_path: Path) -> None:
    bad = tmp_path / "bad.onnx"
    bad.write_bytes(os.urandom(1000))
    done = command("fuse", bad, "-o", tmp_path / "out.onnx")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: ") and len(done.stderr.strip().splitlines()) == 1
    assert [p.name for p in tmp_path.iterdir()] == ["bad.onnx"]


FULL = Path("/dev/full")


@pytest.mark.skipif(not FULL.exists(), reason="no /dev/full here")
@pytest.mark.parametrize("arguments", [["fuse", "--json"], ["fuse"], ["inspect"], ["doctor"], ["version"], ["--help"]])
def test_stdout_that_takes_nothing(path: Path, tmp_path: Path, arguments: list[str]) -> None:
    """A full disk under ``> report.json``: one line, exit code 2, and whether there is a model."""
    out = tmp_path / "out.onnx"
    name = arguments[0]
    more = {"fuse": [str(path), "-o", str(out)], "inspect": [str(path)]}.get(name, [])
    with FULL.open("w") as full:
        program = "from deltafuse.cli import main; main()"
        done = subprocess.run(
            [sys.executable, "-c", program, *arguments, *more], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr
    assert done.stderr.startswith("error: standard output cannot be written: No space left on device")
    if name == "fuse":
        assert done.stderr.endswith("out.onnx was written\n")
        onnx.checker.check_model(str(out), full_check=True)
    assert ("no model was written" in done.stderr) is (name == "inspect")


def test_json_into_a_closed_stdout(path: Path, tmp_path: Path) -> None:
    program = "import os; os.close(1); import sys; sys.stdout = None; from deltafuse.cli import main; main()"
    arguments = ["fuse", str(path), "-o", str(tmp_path / "out.onnx"), "--json"]
    done = subprocess.run([sys.executable, "-c", program, *arguments], stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2 and "standard output is closed" in done.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["in.onnx"]


def test_version_and_help() -> None:
    for arguments in (["version"], ["--version"], ["--version", "fuse"]):
        assert runner.invoke(app, arguments).stdout == f"{__version__}\n"
    assert "fuse" in runner.invoke(app, []).output
    for name in ("fuse", "inspect", "doctor", "version"):
        assert runner.invoke(app, [name, "--help"]).exit_code == 0


def test_doctor() -> None:
    result = runner.invoke(app, ["doctor", "--json"])
    findings = json.loads(result.stdout)
    assert result.exit_code == findings["verdict"]["exit_code"] == (0 if findings["plugin"]["loads"] else 1)
    assert findings["deltafuse"] == __version__ and findings["onnxruntime"]["version"]
    assert {(t["target"], t["runs"]) for t in findings["targets"]} == {("plugin", True), ("portable", True)}
    assert findings["plugin"]["loads"] or findings["plugin"]["problem"]
    text = runner.invoke(app, ["doctor"])
    assert text.exit_code == result.exit_code and "onnxruntime" in text.stdout


@pytest.mark.parametrize(
    ("options", "terminal", "shown"),
    [([], True, True), ([], False, False), (["-q"], True, False), (["--json"], True, False)],
)
def test_progress(pipeline: FakePipeline, path: Path, options: list[str], terminal: bool, shown: bool) -> None:
    """On stderr, on a terminal, and only there."""
    environment = {"FORCE_COLOR": "1"} if terminal else {}
    result = runner.invoke(app, ["inspect", str(path), *options], env=environment)
    assert result.exit_code == 0
    assert ("prove" in result.stderr) is shown, result.stderr


def test_interrupt(pipeline: FakePipeline, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("deltafuse.api._pipeline", lambda: interrupted)
    result = runner.invoke(app, ["fuse", str(path), "-o", str(tmp_path / "out.onnx")])
    assert result.exit_code == 130 and "interrupted" in result.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["in.onnx"]
