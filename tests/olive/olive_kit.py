"""Workflows on small exports, run in this process; what they made is read back as people would."""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from deltafuse.olive_config import package_config
from exports import library


@dataclass
class Made:
    """A workflow's output folder."""

    folder: Path
    output: Any

    @property
    def path(self) -> Path:
        return self.folder / "model.onnx"

    def model(self) -> onnx.ModelProto:
        return onnx.load(self.path)

    def ops(self) -> list[str]:
        return [node.op_type for node in self.model().graph.node]

    @property
    def fused(self) -> int:
        return self.ops().count("KimiDeltaAttention")

    def report(self) -> dict[str, Any]:
        report: dict[str, Any] = json.loads((self.folder / "deltafuse_report.json").read_text())
        return report


def written(name: str, folder: Path) -> Path:
    """An export of tests/data as a file."""
    path = folder / f"{name}.onnx"
    onnx.save(library.export(name).proto(), path)
    return path


def workflow(model: Path | dict[str, Any], folder: Path, *passes: dict[str, Any], **engine: Any) -> dict[str, Any]:
    """The run configuration, as JSON would hold it."""
    given = {"type": "ONNXModel", "model_path": str(model)} if isinstance(model, Path) else deepcopy(model)
    return {
        "input_model": given,
        "passes": {f"p{i}": deepcopy(entry) for i, entry in enumerate(passes)},
        "output_dir": str(folder / "out"),
        "cache_dir": str(folder / "cache"),
        "log_severity_level": 3,
        **deepcopy(engine),
    }


def run(model: Path | dict[str, Any], folder: Path, *passes: dict[str, Any], **engine: Any) -> Made:
    """Run a workflow with the merged package config."""
    from olive.workflows import run as olive_run

    made = olive_run(workflow(model, folder, *passes, **engine), package_config=package_config())
    return Made(folder / "out", made)


def error(made: Made, name: str) -> float:
    """The worst relative L2 error of the workflow's model, beside the export as it was, both in stock ONNX Runtime."""
    export = library.export(name)
    feeds = export.feeds()
    truth = library.run(export.proto(), feeds)
    return library.worst(library.run(made.path, feeds), truth)[0]


def differs(one: np.ndarray, other: np.ndarray) -> float:
    return library.error(one, other)
