"""The support matrix in the README is that of the exports that the tests fuse."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from exports import support_matrix
from exports.library import all_exports

README = Path(__file__).resolve().parent / "README.md"


def test_the_table_is_current() -> None:
    text = README.read_text(encoding="utf-8")
    assert support_matrix.updated(text) == text, "run python tests/exports/support_matrix.py tests/exports/README.md"


def test_every_export_is_counted() -> None:
    table = support_matrix.matrix().split("Left alone")[0]
    for op, title in support_matrix.OPS.items():
        counted = sum(map(int, re.findall(rf"(\d+) {title}\b", table)))
        assert counted == sum(getattr(export, op) or 0 for export in all_exports().values())


@pytest.mark.parametrize(
    ("name", "family", "style", "dtype"),
    [
        ("bailing_decode_bf16_op23", "Ling 3 (`bailing_hybrid`)", "torch.onnx: one token", "bfloat16"),
        ("kimi_hf_prefill_dyn_ortcpu", "Kimi-Linear (`kimi_linear`)", "with ORT's fusions", "float32"),
        ("moe_f16", "experts written by hand", "torch.onnx", "float16"),
        ("moe_glm4", "experts of other models of transformers", "torch.onnx", "float32"),
        ("kda_scan_dynT", "KDA layers written by hand", "`Scan`", "float32"),
    ],
)
def test_an_export_stands_where_it_belongs(name: str, family: str, style: str, dtype: str) -> None:
    export = all_exports()[name]
    assert support_matrix.family(export) == family and support_matrix.dtype(export) == dtype
    assert style in support_matrix.style(export)


def test_a_text_without_markers_is_refused() -> None:
    with pytest.raises(ValueError, match="generated"):
        support_matrix.updated("nothing")
