"""Nearly latent attention is left alone, or fused into exactly what it was."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import numpy as np
import pytest
from exports import library

from . import kit
from .attacks_mla import ATTACKS, Attack


@pytest.mark.parametrize("name", ATTACKS)
def test_no_attack_is_fused_into_something_else(name: str) -> None:
    attack = ATTACKS[name]
    before = attack.model()
    report, after = kit.fuse(before)
    if attack.code:
        assert report.count("mla") == 0, kit.why(report)
        if attack.code == "none":  # so far from attention that no word is lost on it
            assert not report.regions
            return
        refusal = report.regions[0].refusal
        assert refusal is not None
        assert re.fullmatch(attack.code, refusal.code), kit.why(report)
        assert re.search(attack.words, refusal.reason), kit.why(report)
        return
    assert report.count("mla") == 1, kit.why(report)
    first, second = library.session(before), library.session(after)
    for feeds in _feeds(attack, attack.sizes):
        error, output = library.worst(library.run(second, feeds), library.run(first, feeds))
        assert error <= kit.TOLERANCE, f"{output} is off by {error:.1e}"


@pytest.mark.parametrize(("past", "other"), [(5, 4), (4, 5), (5, 0), (0, 5)])
def test_caches_of_two_lengths_give_no_result(past: int, other: int) -> None:
    """Their keys meet in one sum of products: not even a cache of one token is spread over the other's."""
    attack = ATTACKS["two names for the length of the caches"]
    _, after = kit.fuse(attack.model())
    running = library.session(after)
    for feeds in _feeds(attack, ({"B": 3, "T": 1, "P": past, "P2": other},)):
        with pytest.raises(Exception, match="Concat"):
            library.run(running, feeds)


def _feeds(attack: Attack, lengths: Iterable[Mapping[str, int]]) -> list[library.Arrays]:
    rng = np.random.default_rng(5)
    made = []
    for sizes in lengths:
        for scale in attack.scale:
            feeds: library.Arrays = {}
            for value in attack.model().graph.input:
                shape = [
                    d if isinstance(d, int) else sum(sizes[n] for n in d.split(" + ")) for d in library.shape_of(value)
                ]
                drawn = rng.standard_normal(shape)
                if value.name == "pad":
                    feeds["pad"] = drawn < 0.5
                    feeds["pad"][:, 0] = True
                    feeds["pad"][:1] &= not attack.masked
                else:
                    feeds[value.name] = (drawn * (scale if value.name == "x" else 1.0)).astype(np.float32)
            made.append(feeds)
    return made
