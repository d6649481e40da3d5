"""The op's README says what its spec says."""

from __future__ import annotations

from pathlib import Path

from deltafuse.custom_ops.moe.spec import ATTRIBUTES, INPUTS, OUTPUTS
from deltafuse.custom_ops.moe.table import MEANING, markdown, updated

README = Path(__file__).resolve().parents[2] / "custom_ops" / "moe" / "README.md"


def test_readme_is_up_to_date() -> None:
    text = README.read_text(encoding="utf-8")
    assert updated(text) == text, "run python -m deltafuse.custom_ops.moe.table custom_ops/moe/README.md"


def test_everything_is_in_the_tables() -> None:
    assert tuple(MEANING) == ATTRIBUTES
    for name in (*INPUTS, *OUTPUTS, *ATTRIBUTES):
        assert f"`{name}`" in markdown()
