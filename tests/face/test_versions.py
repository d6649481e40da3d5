"""One version everywhere, and what the package's metadata promise."""

from __future__ import annotations

import importlib.metadata
import re
import tomllib
from pathlib import Path
from typing import Any

import deltafuse
import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_the_version_is_the_build_s() -> None:
    """Python, the metadata and the build's own record agree; the record has the release's numbers alone."""
    try:
        installed = importlib.metadata.version("deltafuse")
    except importlib.metadata.PackageNotFoundError:
        assert deltafuse.__version__ == "0.1.0.dev0+checkout"
        return
    assert deltafuse.__version__ == installed
    numbers = re.match(r"\d+(\.\d+)*", installed)
    assert numbers is not None
    recorded = deltafuse.build_info()["version"]
    assert re.fullmatch(r"\d+\.\d+\.\d+", recorded) and recorded.startswith(numbers[0])


def test_where_there_is_no_tag(project: dict[str, Any]) -> None:
    assert project["project"]["dynamic"] == ["version"]
    fallback = project["tool"]["setuptools_scm"]["fallback_version"]
    assert (ROOT / "plugin" / "deltafuse" / "__init__.py").read_text().count(f'"{fallback}+checkout"') == 1
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    cited = re.search(r'^version: "(.*)"', (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert newest is not None and cited is not None
    assert cited[1] == newest[1] == fallback.removesuffix(".dev0")


def test_licence_and_dependencies(project: dict[str, Any]) -> None:
    assert project["project"]["license"] == "Apache-2.0"
    assert "Apache License" in (ROOT / "LICENSE").read_text()
    assert not any(name.startswith("onnxruntime") for name in project["project"]["dependencies"])
    extras = project["project"]["optional-dependencies"]
    assert {"cpu", "gpu", "olive", "test"} <= set(extras)
