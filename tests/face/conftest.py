"""Fixtures: a small model in a file, with its weight inside or beside it, and the stand-in pipeline."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from deltafuse import api

from .kit import FakePipeline, small_model


@pytest.fixture
def proto() -> onnx.ModelProto:
    return small_model()


@pytest.fixture
def path(tmp_path: Path, proto: onnx.ModelProto) -> Path:
    file = tmp_path / "in.onnx"
    onnx.save(proto, file)
    return file


@pytest.fixture
def external_path(tmp_path: Path, proto: onnx.ModelProto) -> Path:
    """The small model with its weight in ``in.onnx.data``."""
    file = tmp_path / "in.onnx"
    onnx.save(proto, file, save_as_external_data=True, location="in.onnx.data", size_threshold=0)
    return file


@pytest.fixture
def pipeline(monkeypatch: pytest.MonkeyPatch) -> FakePipeline:
    fake = FakePipeline()
    monkeypatch.setattr(api, "_pipeline", lambda: fake)
    return fake
