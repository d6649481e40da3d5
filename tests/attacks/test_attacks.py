"""Nearly KDA is left alone, or fused into exactly what it was: also at lengths and sizes that no proof draws."""

from __future__ import annotations

import re

import pytest

from . import kit
from .attacks import ATTACKS


@pytest.mark.parametrize("name", ATTACKS)
def test_no_attack_is_fused_into_something_else(name: str) -> None:
    attack = ATTACKS[name]
    before = attack.layer.model()
    report, after = kit.fuse(before)
    assert len(report.regions) == 1
    if report.count("kda") == 0:
        refusal = report.regions[0].refusal
        assert refusal is not None
        assert re.fullmatch(attack.code, refusal.code), kit.why(report)
        assert re.search(attack.words, refusal.reason), kit.why(report)
    kit.agree(before, after, (*kit.LENGTHS, *attack.beyond), states=attack.states)
