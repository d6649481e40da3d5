"""What a run writes never lands on what it reads, nor on what it writes besides; names that no file can have."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import deltafuse
import onnx
import pytest
from deltafuse import model_io
from deltafuse.cli import app
from deltafuse.errors import OutputError
from typer.testing import CliRunner

from .kit import FakePipeline


def contents(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir()}


@pytest.fixture
def models(external_path: Path) -> Path:
    """A folder with ``in.onnx``, and ``old.onnx`` with its weights in ``old.weights``."""
    folder = external_path.parent
    onnx.save(
        onnx.load(external_path),
        folder / "old.onnx",
        save_as_external_data=True,
        location="old.weights",
        size_threshold=0,
    )
    os.symlink("in.onnx", folder / "link.json")
    os.link(folder / "in.onnx", folder / "hard.json")
    return folder


@pytest.mark.parametrize(
    ("output", "report", "message"),
    [
        ("in.onnx.data", None, "in.onnx.data holds the model's external data: write the output to another file"),
        ("./in.onnx.data", "r.json", "holds the model's external data: write the output to another file"),
        ("o.onnx", "in.onnx", "in.onnx is the model: write the report to another file"),
        ("o.onnx", "link.json", "link.json is the model"),
        ("o.onnx", "hard.json", "hard.json is the model"),
        (None, "in.onnx", "is the model"),
        ("o.onnx", "in.onnx.data", "holds the model's external data: write the report"),
        ("o.onnx", "o.onnx", "o.onnx is the output"),
        ("old.onnx", "old.onnx", "is the output"),
        ("o.onnx", "o.onnx.data", "is kept for the output's external data"),
        ("o.onnx", "o.onnx.3.data", "is kept for the output's external data"),
        ("old.onnx", "old.weights", "holds the external data of the model that is at the output"),
    ],
)
def test_what_would_be_overwritten_is_refused(
    pipeline: FakePipeline,
    models: Path,
    monkeypatch: pytest.MonkeyPatch,
    output: str | None,
    report: str | None,
    message: str,
) -> None:
    monkeypatch.chdir(models)
    before = contents(models)
    with pytest.raises(OutputError, match=message.replace(".", r"\.")):
        deltafuse.fuse("in.onnx", output, report=report)
    arguments = ["fuse", "in.onnx", *(["-o", output] if output else ["--dry-run"])]
    result = CliRunner().invoke(app, [*arguments, *(["--report", report] if report else [])])
    assert result.exit_code == 2 and message in " ".join(result.stderr.split()), result.output
    assert pipeline.calls == [] and contents(models) == before


def test_a_proto_s_data_are_safe_too(pipeline: FakePipeline, external_path: Path) -> None:
    proto = onnx.load(external_path, load_external_data=False)
    model = model_io.load(external_path).model
    for source, how in ((proto, {"base_dir": external_path.parent}), (model, {})):
        for files in (
            {"output": external_path.parent / "in.onnx.data"},
            {"report": external_path.parent / "in.onnx.data"},
        ):
            with pytest.raises(OutputError, match="holds the model's external data"):
                deltafuse.fuse(source, **files, **how)  # type: ignore[arg-type]
    assert pipeline.calls == []


def test_the_input_may_be_the_output(pipeline: FakePipeline, external_path: Path) -> None:
    """In place, with the report beside it; the input's small data that were read early are kept as well."""
    data = external_path.parent / "in.onnx.data"
    before = data.read_bytes()
    for _ in range(2):
        deltafuse.fuse(external_path, external_path, report=external_path.parent / "in.json")
        assert data.read_bytes() == before
    assert (external_path.parent / "in.json").read_text().startswith("{")


@pytest.mark.parametrize("option", ["output", "report"])
@pytest.mark.parametrize("name", ["n" * 300, "\N{SNOWMAN}" * 90, "a/" * 3000 + "b", "nul\0l"])
def test_names_that_no_file_can_have(pipeline: FakePipeline, path: Path, option: str, name: str) -> None:
    with pytest.raises(OutputError, match=r"cannot be written|there is no folder"):
        deltafuse.fuse(path, **{option: path.parent / name})  # type: ignore[arg-type]
    assert pipeline.calls == [] and [p.name for p in path.parent.iterdir()] == ["in.onnx"]


def test_long_names_in_the_command(pipeline: FakePipeline, path: Path) -> None:
    for arguments in (
        ["fuse", str(path), "-o", str(path.parent / ("o" * 300))],
        ["fuse", str(path), "-o", str(path.parent / "o.onnx"), "--report", str(path.parent / ("r" * 300))],
        ["fuse", str(path.parent / ("i" * 300)), "-o", str(path.parent / "o.onnx")],
    ):
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 2 and "unexpected" not in result.stderr, result.output
        assert "File name too long" in result.stderr or "its name has 300 bytes" in result.stderr
    assert pipeline.calls == [] and [p.name for p in path.parent.iterdir()] == ["in.onnx"]


def test_the_longest_names_are_written(pipeline: FakePipeline, path: Path, external_path: Path) -> None:
    longest = os.pathconf(path.parent, "PC_NAME_MAX")
    plain = path.parent / "plain.onnx"
    onnx.save(onnx.load(external_path), plain)
    deltafuse.fuse(plain, path.parent / ("o" * longest), report=path.parent / ("r" * longest))
    assert (path.parent / ("o" * longest)).stat().st_size and (path.parent / ("r" * longest)).stat().st_size
    shutil.copy(path, path.parent / "copy.onnx")
    before = contents(path.parent)
    with pytest.raises(OutputError, match=rf"its name has {longest + 5} bytes, {longest} are possible"):
        deltafuse.fuse(external_path, path.parent / ("x" * longest))
    assert contents(path.parent) == before
