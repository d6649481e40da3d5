"""The proof accepts right candidates of mixtures of experts and no wrong one, whatever a recogniser claims."""

from __future__ import annotations

from functools import cache

import pytest
from deltafuse.fusions.candidate import Candidate
from deltafuse.fusions.graph import GraphView
from deltafuse.fusions.pipeline import fuse_model
from deltafuse.fusions.proof import Prover, prove
from deltafuse.fusions.result import ProofReport
from exports import library

from .moe_candidate_mutants import MUTANTS

#: Groups with each mask, weights of masked groups, fewer experts kept than chosen; each score, activation and clamp;
#: biases, gates, an epsilon; weights quantized in blocks, in rows, with zero points; loops; biases of experts, a slope
#: and an offset, choosing by logits, a least divisor, experts without weights.
BASES = (
    "moe_gather",
    "moe_zero_mask",
    "moe_masked_weights",
    "moe_few_kept",
    "moe_few_kept_zero",
    "moe_masked_few",
    "moe_softmax_no_groups",
    "moe_unnormalised",
    "moe_eps",
    "moe_linear_bias",
    "moe_gelu",
    "moe_gelu_tanh",
    "moe_relu2_plain",
    "moe_clamp_before",
    "moe_clamp_after",
    "moe_where_rows",
    "moe_int4_gather",
    "moe_uint4_stacked",
    "moe_uint8_dense",
    "moe_gpt_oss",
    "moe_biased_gather",
    "moe_cohere2",
    "moe_norm_least",
    "moe_zero_turns",
)
#: Bases that a mutant is tried on, at most.
MOST = 4


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
        fuse_model(library.export(base).model(), dry_run=True, fusions=["moe"])
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
        if tried == MOST:
            break
        tried += 1
        report = prove(view, mutant, opset)
        assert not report.proved, f"{base}: accepted with error {report.error:.1e}"
        assert report.reason
    assert tried, "the mistake applies to none of the bases"
