"""Fusions from other packages, installed as pip would: a folder on the path with the package and its metadata."""

from __future__ import annotations

import json
import lzma
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import onnx
import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
EXAMPLE = ROOT / "examples" / "custom_fusion"


def install(folder: Path, package: Path, name: str, points: dict[str, str]) -> Path:
    """Put a package and its metadata into a folder, as an installer does."""
    shutil.copytree(package, folder / package.name, ignore=shutil.ignore_patterns("__pycache__"))
    metadata = folder / f"{name.replace('-', '_')}-1.0.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0.0\n")
    lines = [f"{key} = {value}" for key, value in points.items()]
    (metadata / "entry_points.txt").write_text("\n".join(["[deltafuse.fusions]", *lines, ""]))
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One KDA layer, and three SwiGLUs of MLPs and experts."""
    path = tmp_path_factory.mktemp("model") / "in.onnx"
    packed = ROOT / "tests" / "data" / "bailing_wrap_decode_dyn_batched.onnx.xz"
    path.write_bytes(lzma.decompress(packed.read_bytes()))
    return path


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package of examples/custom_fusion, with the entry points of its own pyproject.toml."""
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    points = project["entry-points"]["deltafuse.fusions"]
    return install(tmp_path_factory.mktemp("site"), EXAMPLE / "swiglu_fusion", project["name"], points)


def command(site: Path | None, *arguments: Any, **environment: str) -> subprocess.CompletedProcess[str]:
    """``deltafuse`` in a process of its own, with a folder of packages."""
    path = os.pathsep.join(filter(None, (str(site) if site else "", os.environ.get("PYTHONPATH", ""))))
    program = "from deltafuse.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
    )


def test_an_op_from_outside(model: Path, example: Path, tmp_path: Path) -> None:
    """It is found, proved, counted, named in the metadata; the model runs where the package is not."""
    out = tmp_path / "out.onnx"
    arguments = ["--require", "kda=1", "--require", "swiglu=2", "--fusions", "kda,swiglu", "--json"]
    done = command(example, "fuse", model, "-o", out, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    regions = [region for region in json.loads(done.stdout)["regions"] if region["op"] == "swiglu"]
    assert len(regions) >= 2
    for region in regions:
        assert region["status"] == "fused" and region["form"] == "silu-mul"
        assert region["proof"]["proved"] and region["proof"]["error"] <= region["proof"]["tolerance"]
    made = onnx.load(out)
    assert sum(node.domain == "acme" for node in made.graph.node) == len(regions)
    assert f"swiglu={len(regions)}" in {p.key: p.value for p in made.metadata_props}["deltafuse.fused"]
    onnx.checker.check_model(made, full_check=True)
    checked = command(None, "verify", model, out, "--tokens", 2, "--steps", 1)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_written_out_for_the_portable_target(model: Path, example: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.onnx"
    arguments = ["--target", "portable", "--fusions", "kda,swiglu", "--require", "swiglu=2", "-q"]
    done = command(example, "fuse", model, "-o", out, *arguments)
    assert done.returncode == 0, done.stderr
    made = onnx.load(out)
    assert not made.functions and {node.domain for node in made.graph.node} == {""}


def test_a_choice_of_fusions(model: Path, example: Path) -> None:
    done = command(example, "inspect", model, "--fusions", "swiglu", "--json")
    assert {region["op"] for region in json.loads(done.stdout)["regions"]} == {"swiglu"}
    assert not any(
        region["op"] == "swiglu" for region in json.loads(command(None, "inspect", model, "--json").stdout)["regions"]
    )
    off = command(example, "inspect", model, "--fusions", "swiglu", DELTAFUSE_PLUGINS="0")
    assert off.returncode == 2 and "expected keys among kda" in off.stderr


def test_clean_ups_and_more_recognisers(model: Path, tmp_path: Path) -> None:
    points = {"tidy": "outside:Tidy", "more": "outside:MoreKda"}
    done = command(install(tmp_path, HERE / "outside", "outside", points), "inspect", model, "--json")
    report = json.loads(done.stdout)
    names = [entry["name"] for entry in report["passes"]]
    assert names.index("fold-constants") < names.index("outside-tidy") < names.index("fuse-kda")
    assert names.index("fuse-kda") < names.index("outside-kda")
    assert [r["refusal"]["reason"] for r in report["regions"] if r["form"] == "outside"] == ["seen, and left alone"]
    assert not any("outside" in warning for warning in report["warnings"])


def test_what_does_not_load_is_told_and_harms_nobody(model: Path, tmp_path: Path) -> None:
    expected = {
        "absent": ("outside:Absent", "AttributeError"),
        "function": ("outside:function", "expected a class derived from"),
        "gone": ("gone:Gone", "No module named 'gone'"),
        "nameless": ("outside:Nameless", "Nameless has no name"),
        "no-op": ("outside:NoOp", "expected an instance of a FusedOp"),
        "taken": ("outside:Taken", "the key 'kda' is that of deltafuse::KimiDeltaAttention"),
    }
    points = {name: value for name, (value, _) in expected.items()}
    site = install(tmp_path, HERE / "outside", "outside", points)
    done = command(site, "fuse", model, "-o", tmp_path / "out.onnx", "--require", "kda=1", "--json")
    assert done.returncode == 0, done.stderr
    warnings = json.loads(done.stdout)["warnings"]
    for name, (_, text) in expected.items():
        (told,) = [w for w in warnings if w.startswith(f"the fusion '{name}' of outside 1.0.0 is not used: ")]
        assert text in told
    asked = command(site, "inspect", model, "--fusions", "gone")
    assert asked.returncode == 2 and "No module named 'gone'" in asked.stderr
