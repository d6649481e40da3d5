"""Wrong latent attention is left as it is, or fused into something that computes exactly the same wrong thing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from deltafuse.fusions.candidate import Candidate
from deltafuse.fusions.graph import GraphView
from deltafuse.fusions.pipeline import fuse_model
from deltafuse.fusions.proof import Prover, prove
from deltafuse.fusions.result import ProofReport
from exports import library

from .mla_form_mutants import MUTANTS
from .mla_mutant_check import assert_not_fused_into_something_else

#: Sizes of the inputs: tiny ones show where an epsilon stands, large ones what saturates.
SCALES = (1e-3, 1.0, 10.0, 60.0)
BASES = tuple(dict.fromkeys(base for base, _ in MUTANTS.values()))


def inputs(base: str, scale: float) -> library.Arrays:
    """Random inputs; lengths at which bounds on positions would show."""
    export = library.export(base)
    binding = {**export.bindings[0], "S": 57, "past": 23, "s62": 11}
    feeds = export.feeds(binding, seed=5)
    for array in feeds.values():
        if array.dtype == np.bool_:
            array[..., -5:] = False
    return {n: a * np.float32(scale) if n == "x" else a for n, a in feeds.items()}


@cache
def right(base: str, scale: float) -> library.Arrays:
    """What the unedited export gives."""
    return library.run(library.session(library.export(base).proto()), inputs(base, scale))


@pytest.mark.parametrize("name", MUTANTS)
def test_no_mutant_is_fused_into_something_else(name: str) -> None:
    base, edit = MUTANTS[name]
    assert_not_fused_into_something_else(base, edit, inputs, right, SCALES)


def test_the_right_layers_are_fused() -> None:
    """The bases themselves fuse: what the mutants show is not a recogniser that refuses everything."""
    for base in BASES:
        assert fuse_model(library.export(base).model()).count("mla") == 1, base


# --- wrong candidates of right layers ---------------------------------------------------------------------------------

Wrong = Callable[[Candidate], Candidate | None]


def config(**changes: Any) -> Wrong:
    def wrong(candidate: Candidate) -> Candidate | None:
        changed = replace(candidate.config, **changes)
        return None if changed == candidate.config or changed.check() else replace(candidate, config=changed)

    return wrong


def scaled(attribute: str, factor: float) -> Wrong:
    def wrong(candidate: Candidate) -> Candidate | None:
        value = getattr(candidate.config, attribute) * factor
        if attribute == "kv_norm_eps" and not candidate.config.has_kv_norm:
            return None
        return replace(candidate, config=replace(candidate.config, **{attribute: value}))

    return wrong


def swapped(first: str, second: str) -> Wrong:
    def wrong(candidate: Candidate) -> Candidate | None:
        if first not in candidate.operands or second not in candidate.operands:
            return None
        operands = dict(candidate.operands)
        operands[first], operands[second] = operands[second], operands[first]
        return replace(candidate, operands=operands)

    return wrong


def dropped(operand: str, **changes: Any) -> Wrong:
    def wrong(candidate: Candidate) -> Candidate | None:
        if operand not in candidate.operands:
            return None
        operands = {n: o for n, o in candidate.operands.items() if n != operand}
        return replace(candidate, operands=operands, config=replace(candidate.config, **changes))

    return wrong


def parameter(name: str, change: Callable[[np.ndarray], np.ndarray]) -> Wrong:
    def wrong(candidate: Candidate) -> Candidate | None:
        right_one = candidate.parameters.get(name)
        if right_one is None:
            return None

        def compute(arrays: Any) -> np.ndarray | None:
            value = arrays[0] if right_one.compute is None else right_one.compute(arrays)
            return None if value is None else np.ascontiguousarray(change(value))

        made = replace(right_one, compute=compute)
        return replace(candidate, parameters={**candidate.parameters, name: made})

    return wrong


WRONG: dict[str, Wrong] = {
    "scale_doubled": scaled("scale", 2.0),
    "scale_negated": scaled("scale", -1.0),
    "scale_a_hundredth_off": scaled("scale", 1.01),
    "norm_eps_ten_times": scaled("kv_norm_eps", 10.0),
    "norm_eps_tiny": scaled("kv_norm_eps", 1e-6),
    "rope_by_halves": config(rope="half"),
    "rope_in_pairs": config(rope="interleaved"),
    "rope_in_pairs_brought_apart": config(rope="deinterleaved"),
    "causal_dropped": config(causal=0, window=0),
    "window_of_three": config(window=3),
    "window_dropped": config(window=0),
    "cosine_and_sine_swapped": swapped("cos", "sin"),
    "mask_dropped": dropped("attn_mask", has_mask=False, bool_mask=False),
    "gate_dropped": dropped("gate", gate_activation="none"),
    "norm_weight_one": parameter("kv_norm_weight", np.ones_like),
    "norm_weights_reversed": parameter("kv_norm_weight", lambda a: a[::-1]),
    "weights_rolled": parameter("kv_b_weight", lambda a: np.roll(a, 1, axis=1)),
    "weights_of_another_channel": parameter("kv_b_weight", lambda a: np.roll(a, 1, axis=0)),
    "weights_negated": parameter("kv_b_weight", np.negative),
}
#: Of one token, no cache and no window no claim about causality is wrong; the scores of a right layer do not tell pairs
#: in place from pairs brought apart, and only a cache of keys does.
CANDIDATES = (
    *BASES,
    "mla_true_rope",
    "mla_window",
    "mla_packed",
    "mla_static",
    "mla_start_batch",
    "bailing_batch2_decode",
)


@cache
def proved(base: str) -> tuple[GraphView, Candidate, int]:
    """The latent attention that a dry run proves, with the graph it is of."""
    found: list[tuple[GraphView, Candidate, int]] = []
    original = Prover.prove

    def spy(self: Prover, candidate: Candidate) -> ProofReport:
        report = original(self, candidate)
        if report.proved and candidate.op.key == "mla":
            found.append((self.view, candidate, self.opset))
        return report

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Prover, "prove", spy)
        fuse_model(library.export(base).model(), dry_run=True)
    assert found, f"{base}: nothing was proved"
    return found[0]


def same_function(candidate: Candidate, wrong: Candidate) -> bool:
    """Is what the mutant claims right as well?"""
    before, after = candidate.config, wrong.config
    pairs = {"interleaved", "deinterleaved"}
    if before.rope != after.rope and {before.rope, after.rope} <= pairs:
        return not before.has_present and before.cos_width * 2 == before.qk_rope_head_dim
    if candidate.one_token and before.causal != after.causal:
        return before.window == after.window
    return False


@pytest.mark.parametrize("name", WRONG)
def test_wrong_candidates_are_refused(name: str) -> None:
    tried = 0
    for base in CANDIDATES:
        view, candidate, opset = proved(base)
        wrong = WRONG[name](candidate)
        if wrong is None or same_function(candidate, wrong):
            continue
        tried += 1
        report = prove(view, wrong, opset)
        assert not report.proved, f"{base}: accepted with error {report.error:.1e}"
        assert report.reason
    assert tried, "the mistake applies to none of the bases"
