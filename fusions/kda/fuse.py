"""The pass that finds, proves and replaces KDA blocks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

import onnx_ir as ir

from ...custom_ops.common.refusal import Refusal
from ...custom_ops.kda.spec import cuda_refusal
from ..candidate import Candidate
from ..graph import GraphView, is_op
from ..passes import Pass, Progress
from ..proof import ProofBudget, Prover
from ..proof.problem import ProofImpossible
from ..replacement import type_refusal
from ..result import PassReport, ProofReport, RegionReport
from ..rewrite import Accepted, rewrite
from .operands import short
from .recognise import Reading, is_near_miss, read_site
from .sites import Site, find_sites, region_size

#: Of the refusals of several readings the most telling one is reported: a layout that does not fit says least.
_TELLING = {"shape": 0, "proof": 1, "region-run": 1, "mismatch": 2, "budget": 3, "dtype": 4}


class FuseKda(Pass):
    """Replace each proved KDA block by one call of ``deltafuse::KimiDeltaAttention``.

    Args:
        verify: prove every structure; without, blocks are replaced on the screening's word and marked so.
        apply: rewrite the model; without, only say what would be done.
    """

    name = "fuse-kda"
    needs = frozenset({"constants", "types", "rms-norms"})
    gives = frozenset({"kda"})

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

    def run(self, model: ir.Model, report: PassReport) -> None:
        view = GraphView(model.graph)
        prover = Prover(view, model.graph.opset_imports[""], self.budget)
        accepted: list[Accepted] = []
        taken: set[ir.Value] = set()
        kept: dict[str, list[ir.Node]] = {}
        sites = list(find_sites(view))
        for i, site in enumerate(sites):
            if self.progress is not None:
                self.progress(f"{self.name}: {site.name}", i, len(sites))
            region, found = self._site(view, site, prover)
            if found is not None and taken.intersection(found.candidate.output_values()):
                continue
            if region is not None:
                self.regions.append(region)
                if region.refusal is not None:
                    report.refused.append(region.refusal)
            if found is not None:
                taken.update(found.candidate.output_values())
                kept[site.name] = site.anchors
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
                region.notes.append(
                    "the original recurrence stays beside the fused node: a value inside it is used elsewhere"
                )

    def _site(self, view: GraphView, site: Site, prover: Prover) -> tuple[RegionReport | None, Accepted | None]:
        region = RegionReport("kda", site.name, "refused", region_size(site.region), site.form)
        readings = read_site(view, site)
        if isinstance(readings, Refusal):
            region.refusal = readings
            return (region, None) if is_near_miss(view, site) else (None, None)
        refusal, proof = None, None
        for candidate in self._screened(view, prover, readings, region):
            proof = prover.prove(candidate) if self.verify else None
            if proof is not None and not proof.proved:
                refusal = refusal or Refusal("unproved", proof.reason, site.name)
                region.proof = region.proof or proof
                if proof.out_of_time:
                    break
                continue
            try:
                parameters = prover.parameters(candidate)
            except ProofImpossible as error:
                refusal = refusal or Refusal("parameters", str(error), site.name)
                continue
            self._describe(region, site, candidate, proof)
            return region, Accepted(candidate, parameters)
        if refusal is not None:
            region.refusal = refusal
        if region.refusal is None:
            region.refusal = Refusal(
                "reading", "no reading of the block's operands gives what the block gives", site.name
            )
        return region, None

    def _screened(
        self, view: GraphView, prover: Prover, readings: Iterator[Reading], region: RegionReport
    ) -> Iterator[Candidate]:
        """Candidates of the readings that fit at a glance, with their scale."""
        closest: Refusal | None = None
        for reading in readings:
            measured = type_refusal(reading.core) or prover.screen(reading.core)
            if isinstance(measured, Refusal):
                if closest is None or _TELLING.get(measured.code, 1) > _TELLING.get(closest.code, 1):
                    closest = measured
                region.refusal = closest
                if measured.code == "budget":
                    return
                continue
            scale = snap_scale(view, reading.core, measured)
            if scale is None:
                region.refusal = Refusal("scale", f"the output scale {measured:.7g} is no constant of the block")
                continue
            region.refusal = None
            yield from reading.scaled(scale)

    def _describe(self, region: RegionReport, site: Site, candidate: Candidate, proof: ProofReport | None) -> None:
        region.status = ("fused" if proof is not None else "fused-unproved") if self.apply else "recognised"
        region.refusal = None
        region.config = {**asdict(candidate.config), "one_token": candidate.one_token}
        region.absorbed, region.not_absorbed = candidate.absorbed, candidate.not_absorbed
        region.proof = proof
        region.notes = [*candidate.notes, *repairs(candidate, proof)]
        if rounds_inside(candidate):
            region.notes.append("the original rounds some values inside to 16 bits; the fused op keeps float32 there")
        limited = cuda_refusal(candidate.config)
        if limited is not None:
            region.notes.append(f"on CUDA the portable body runs it: {limited.reason}")


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


def snap_scale(view: GraphView, core: Candidate, measured: float) -> float | None:
    """The exact scale near a measured one: 1/sqrt(head_dim), 1, or a constant of the region."""
    exact = [1.0, core.config.head_dim**-0.5]
    for node in core.region.nodes:
        if is_op(node, "Mul", "Div"):
            for value in node.inputs:
                constant = view.scalar(value)
                if constant:
                    exact += [constant, 1.0 / constant]
        elif node.op_type == "LinearAttention" and "scale" in node.attributes:
            exact.append(node.attributes["scale"].as_float())
    nearest = min(exact, key=lambda value: abs(measured - value) / abs(value))
    return short(nearest) if abs(measured - nearest) <= 2e-5 * abs(nearest) else None


def repairs(candidate: Candidate, proof: ProofReport | None) -> list[str]:
    """What the original gets wrong and the fused block gets right, as the proof's probes saw it."""
    if proof is None:
        return []
    failed = sorted({c["tokens"] for c in proof.cases if "original" in c and c["original"].startswith("fails")})
    good = sorted({c["tokens"] for c in proof.cases if "errors" in c})
    if failed and good and min(failed) > max(good):
        return [
            f"repaired: the original runs up to {max(good)} tokens and fails from {min(failed)} on; "
            "fused, it takes any length"
        ]
    return []
