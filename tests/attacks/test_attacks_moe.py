"""Nearly a mixture of experts is left alone, or fused into exactly what it was."""

from __future__ import annotations

import re

import numpy as np
import pytest
from exports import library

from . import kit
from .attacks_moe import ATTACKS, Attack


@pytest.mark.parametrize("name", ATTACKS)
def test_no_attack_is_fused_into_something_else(name: str) -> None:
    attack = ATTACKS[name]
    before = attack.model()
    report, after = kit.fuse(before)
    if attack.code:
        assert report.count("moe") == 0, kit.why(report)
        if attack.code == "none":  # so far from a router that no word is lost on it
            assert not report.regions
            return
        refusal = report.regions[0].refusal
        assert refusal is not None
        assert re.fullmatch(attack.code, refusal.code), kit.why(report)
        assert re.search(attack.words, refusal.reason), kit.why(report)
        return
    assert report.count("moe") == 1, kit.why(report)
    first, second = library.session(before), library.session(after)
    for feeds in _feeds(attack):
        error, output = library.worst(library.run(second, feeds), library.run(first, feeds))
        assert error <= kit.TOLERANCE, f"{output} is off by {error:.1e}"


def _feeds(attack: Attack) -> list[library.Arrays]:
    rng = np.random.default_rng(5)
    made = []
    for sizes in attack.sizes:
        for scale in attack.scale:
            (value,) = attack.model().graph.input
            shape = [d if isinstance(d, int) else sizes[d] for d in library.shape_of(value)]
            feeds = {value.name: (rng.standard_normal(shape) * scale).astype(np.float32)}
            made.append(feeds)
    return made
