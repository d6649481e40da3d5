"""The proof accepts right candidates and no wrong one, whatever a recogniser claims."""

from __future__ import annotations

from functools import cache

import pytest
from deltafuse.fusions.candidate import Candidate
from deltafuse.fusions.graph import GraphView
from deltafuse.fusions.pipeline import fuse_model
from deltafuse.fusions.proof import Prover, prove
from deltafuse.fusions.result import ProofReport
from exports import library

from .candidate_mutants import MUTANTS

#: One token with three convolutions and all states; the bounded gate; the chunked form; a Scan;
#: SiLU gate and F.normalize; a V-first state.
BASES = (
    "kda_decode_T1",
    "bailing_bound3_decode",
    "chunk16_T32_beta2",
    "kda_scan_dynT",
    "decode_conv3_native_op23",
    "decode_vfirst",
)


@cache
def proved(base: str) -> tuple[GraphView, Candidate, int]:
    """The candidate that a dry run proves, with the graph it is of."""
    found: list[tuple[GraphView, Candidate, int]] = []
    right = Prover.prove

    def spy(self: Prover, candidate: Candidate) -> ProofReport:
        report = right(self, candidate)
        if report.proved:
            found.append((self.view, candidate, self.opset))
        return report

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Prover, "prove", spy)
        fuse_model(library.export(base).model(), dry_run=True)
    assert found, f"{base}: nothing was proved"
    return found[0]


@pytest.mark.parametrize("base", BASES)
def test_right_candidates_are_accepted(base: str) -> None:
    view, candidate, opset = proved(base)
    assert prove(view, candidate, opset).proved


@pytest.mark.parametrize("name", MUTANTS)
def test_wrong_candidates_are_refused(name: str) -> None:
    tried = 0
    for base in BASES:
        view, candidate, opset = proved(base)
        mutant = MUTANTS[name](candidate)
        if mutant is None:
            continue
        tried += 1
        report = prove(view, mutant, opset)
        assert not report.proved, f"{base}: accepted with error {report.error:.1e}"
        assert report.reason
    assert tried, "the mistake applies to none of the bases"
