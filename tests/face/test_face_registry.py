"""Who can run what, from which ONNX Runtime on."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
from deltafuse.registry import targets
from deltafuse.registry.ops import OPS


def test_ops_agree_with_their_specs() -> None:
    for key, op in OPS.items():
        spec = importlib.import_module(f"deltafuse.{op.spec}")
        assert (op.domain, op.op_type, op.version) == (spec.DOMAIN, spec.OP_TYPE, spec.VERSION)
        assert op.key == key and op.qualified_name == f"{spec.DOMAIN}::{spec.OP_TYPE}"
    assert all(set(target.ops) <= set(OPS) for target in targets.TARGETS.values())


@pytest.mark.parametrize(
    ("op", "target", "version", "code"),
    [
        ("kda", "plugin", "1.27.0", None),
        ("kda", "portable", "1.33.0.dev20261101", None),
        ("kda", "plugin", "2.0", None),
        ("kda", "plugin", "1.26.9", "ort-version"),
        ("kda", "portable", "1.9.0", "ort-version"),
        ("kda", "portable", "unknown", "ort-version"),
        ("kda", "tensorrt", "1.32.0", "target"),
        ("mamba", "plugin", "1.32.0", "op"),
    ],
)
def test_can_run(op: str, target: str, version: str, code: str | None) -> None:
    refusal = targets.refusal(op, target, version)
    assert (refusal and refusal.code) == code
    assert targets.can_run(op, target, version) is (code is None)


def test_the_readme_is_up_to_date() -> None:
    from deltafuse.registry import table

    readme = Path(__file__).resolve().parents[2] / "registry" / "README.md"
    text = readme.read_text(encoding="utf-8")
    assert table.updated(text) == text, "run python -m deltafuse.registry.table registry/README.md"
    with pytest.raises(ValueError, match="generated"):
        table.updated("nothing")
