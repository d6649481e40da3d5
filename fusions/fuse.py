"""The pass that finds, proves and replaces the blocks of one op: what is the same for all ops."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field

import onnx_ir as ir

from ..custom_ops.common.refusal import Refusal
from .candidate import Candidate
from .graph import GraphView, is_op, subgraphs_of
from .op import FusedOp
from .parameters import ProofImpossible
from .passes import Pass, Progress
from .proof import ProofBudget, Prover
from .region import Region
from .replacement import given_parameters
from .result import PassReport, ProofReport, RegionReport
from .rewrite import Accepted, rewrite


@dataclass
class Place:
    """Where a block may be.

    Attributes:
        name: for the report.
        form: how the exporter wrote it, for the report.
        region: the nodes that it is thought to have.
        anchors: nodes that are gone once the block is replaced; if one stays, the report says so.
    """

    name: str
    form: str
    region: Region
    anchors: list[ir.Node] = field(default_factory=list)


class FusePass(Pass):
    """Replace each proved block of an op by one call of it.

    A recogniser defines :meth:`places` and :meth:`candidates`, and may define :meth:`notes`.

    Args:
        verify: prove every structure; without, blocks are replaced on the recogniser's word and marked so.
        apply: rewrite the model; without, only say what would be done.
    """

    op: FusedOp

    def __init__(
        self,
        *,
        verify: bool = True,
        apply: bool = True,
        budget: ProofBudget | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.verify, self.apply, self.budget, self.progress = verify, apply, budget, progress
        self.regions: list[RegionReport] = []

    @abstractmethod
    def places(self, view: GraphView) -> list[Place]:
        """All places to try, in graph order."""

    @abstractmethod
    def candidates(
        self, view: GraphView, place: Place, prover: Prover, region: RegionReport
    ) -> Iterator[Candidate] | Refusal | None:
        """What the block at a place may be, likeliest first; the reason why it is none; None: nothing worth a word.

        It may set ``region.refusal`` as it goes on: that is what the report says when no candidate is left.
        """

    def notes(self, candidate: Candidate, proof: ProofReport | None) -> list[str]:
        """Remarks on a fused block for the report."""
        return []

    # --- the pass ---------------------------------------------------------------------------------------------------

    def run(self, model: ir.Model, report: PassReport) -> None:
        view = GraphView(model.graph)
        prover = Prover(view, model.graph.opset_imports[""], self.budget)
        accepted: list[Accepted] = []
        taken: set[ir.Value] = set()
        kept: dict[str, list[ir.Node]] = {}
        places = self.places(view)
        for i, place in enumerate(places):
            if self.progress is not None:
                self.progress(f"{self.name}: {place.name}", i, len(places))
            region, found = self._place(view, place, prover)
            if found is not None and taken.intersection(found.candidate.output_values()):
                continue
            if region is not None:
                self.regions.append(region)
                if region.refusal is not None:
                    report.refused.append(region.refusal)
            if found is not None:
                taken.update(found.candidate.output_values())
                kept[place.name] = place.anchors
                accepted.append(found)
        report.matched = len(accepted)
        if accepted and self.apply:
            rewrite(model, view, accepted)
            report.changed = True
            for name, anchors in kept.items():
                if any(a.graph is not None for a in anchors):
                    self._note_kept(name)

    def _note_kept(self, name: str) -> None:
        for region in self.regions:
            if region.name == name:
                region.notes.append("the original stays beside the fused node: a value inside it is used elsewhere")

    def _place(self, view: GraphView, place: Place, prover: Prover) -> tuple[RegionReport | None, Accepted | None]:
        region = RegionReport(self.op.key, place.name, "refused", region_size(place.region), place.form)
        region.members = members_of(place.region)
        found = self.candidates(view, place, prover, region)
        if found is None:
            return None, None
        if isinstance(found, Refusal):
            region.refusal = found
            return region, None
        refusal, proof = None, None
        for candidate in found:
            looped = reads_its_results(view, candidate)
            if looped is not None:
                refusal = refusal or Refusal("cycle", looped, place.name)
                continue
            proof = prover.prove(candidate) if self.verify else None
            if proof is not None and not proof.proved:
                refusal = refusal or Refusal("unproved", proof.reason, place.name)
                region.proof = region.proof or proof
                if proof.out_of_time:
                    break
                continue
            try:
                parameters = given_parameters(view, candidate)
            except ProofImpossible as error:
                refusal = refusal or Refusal("parameters", str(error), place.name)
                continue
            self._describe(region, candidate, proof)
            return region, Accepted(candidate, parameters)
        if refusal is not None:
            region.refusal = refusal
        if region.refusal is None:
            region.refusal = Refusal(
                "reading", "no reading of the block's operands gives what the block gives", place.name
            )
        return region, None

    def _describe(self, region: RegionReport, candidate: Candidate, proof: ProofReport | None) -> None:
        region.status = ("fused" if proof is not None else "fused-unproved") if self.apply else "recognised"
        region.refusal = None
        region.members = members_of(candidate.region)
        region.config = candidate.op.describe(candidate)
        region.absorbed, region.not_absorbed = candidate.absorbed, candidate.not_absorbed
        region.proof = proof
        region.notes = [*candidate.notes, *repairs(proof)]
        if rounds_inside(candidate):
            region.notes.append("the original rounds some values inside to 16 bits; the fused op keeps float32 there")
        region.notes += self.notes(candidate, proof)


def reads_its_results(view: GraphView, candidate: Candidate) -> str | None:
    """In words, which operand is made from the block's own results (a mask as long as the cache that it gives, say):
    one node can't stand for both. None where there is none."""
    results = set(candidate.output_values())
    first = min((view.position[p] for v in results if (p := v.producer()) is not None), default=0)
    for start in candidate.input_values():
        stack, seen = [start], {start}
        while stack:
            value = stack.pop()
            if value in results:
                return f"the operand {start.name!r} is made from {value.name!r}, which the block gives"
            producer = value.producer()
            if producer is not None and view.position[producer] >= first:
                fresh = [v for v in view.inputs_of(producer) if v not in seen]
                seen.update(fresh)
                stack += fresh
    return None


def region_size(region: Region) -> int:
    """Nodes of the region, those in subgraphs counted too."""
    total = 0
    stack = list(region.nodes)
    while stack:
        node = stack.pop()
        total += 1
        for graph in subgraphs_of(node):
            stack.extend(graph)
    return total


def members_of(region: Region) -> list[tuple[str, str, tuple[str, ...]]]:
    """The region's nodes for the report: op, name, names of outputs."""
    return [
        (f"{n.domain}::{n.op_type}" if n.domain else n.op_type, n.name or "", tuple(v.name or "" for v in n.outputs))
        for n in region.nodes
    ]


def rounds_inside(candidate: Candidate) -> bool:
    """Does the original narrow values between its operands and its results?"""
    half = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
    results = set(candidate.output_values())
    return any(
        is_op(node, "Cast")
        and ir.DataType(node.attributes["to"].as_int()) in half
        and node.outputs[0] not in results
        and not any(is_op(u, "Reshape", "Transpose") and u.outputs[0] in results for u, _ in node.outputs[0].uses())
        for node in candidate.region.nodes
    )


def repairs(proof: ProofReport | None) -> list[str]:
    """What the original gets wrong and the fused block gets right, as the proof's probes saw it."""
    if proof is None:
        return []
    cases = [c for c in proof.cases if "tokens" in c]
    failed = sorted({c["tokens"] for c in cases if "original" in c and c["original"].startswith("fails")})
    good = sorted({c["tokens"] for c in cases if "errors" in c})
    if failed and good and min(failed) > max(good):
        return [
            f"repaired: the original runs up to {max(good)} tokens and fails from {min(failed)} on; "
            "fused, it takes any length"
        ]
    return []
