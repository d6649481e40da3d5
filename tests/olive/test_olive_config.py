"""The merged package config and the command that writes it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from deltafuse import __version__
from deltafuse.cli import app
from deltafuse.olive_config import PASS_ENTRY, default_config_path, package_config
from typer.testing import CliRunner


def test_nothing_of_olives_is_lost() -> None:
    ours, theirs = package_config(), json.loads(default_config_path().read_text())
    assert ours["passes"].pop("DeltaFuse") == PASS_ENTRY
    assert ours == theirs and len(theirs["passes"]) > 50


def test_olive_takes_it() -> None:
    from deltafuse.olive import DeltaFuse
    from olive.package_config import OlivePackageConfig

    config = OlivePackageConfig.model_validate(package_config())
    assert config.import_pass_module("DeltaFuse") is DeltaFuse
    assert OlivePackageConfig.get_default_config_path() == str(default_config_path())


def test_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    runner = CliRunner()
    result = runner.invoke(app, ["olive-config"])
    path = Path(result.stdout.strip())
    assert result.exit_code == 0 and path.is_absolute() and path.is_relative_to(tmp_path), result.output
    assert __version__ in path.name and json.loads(path.read_text()) == package_config()

    mine = tmp_path / "mine.json"
    mine.write_text(json.dumps({"passes": {"Mine": {"module_path": "mine.Mine"}}, "extra_dependencies": {"x": ["y"]}}))
    arguments = ["olive-config", "--base", str(mine), "-o", str(tmp_path / "merged.json"), "--json"]
    found = json.loads(runner.invoke(app, arguments).stdout)
    assert found["path"] == str(tmp_path / "merged.json") and found["pass"] == "DeltaFuse"
    merged = json.loads((tmp_path / "merged.json").read_text())
    assert {"Mine", "DeltaFuse", "OnnxConversion"} <= set(merged["passes"]) and merged["extra_dependencies"]["x"] == [
        "y"
    ]

    mine.write_text("[]")
    result = runner.invoke(app, ["olive-config", "--base", str(mine)])
    assert result.exit_code == 2 and "no package config" in result.stderr
