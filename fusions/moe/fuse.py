"""The pass that finds, proves and replaces mixtures of experts."""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from ...custom_ops.common.refusal import Refusal
from ...custom_ops.moe.body import OPSETS
from ...custom_ops.moe.spec import cuda_refusal
from ..candidate import Candidate
from ..fuse import FusePass, Place
from ..graph import GraphView
from ..proof import Prover
from ..result import PassReport, ProofReport, RegionReport
from .op import MOE
from .recognise import read_site
from .scaled import ScaledWeights
from .sites import Site, find_sites


class FuseMoe(FusePass):
    """Replace each proved mixture of experts by one call of ``deltafuse::GroupedQMoE``."""

    name = "fuse-moe"
    needs = frozenset({"constants", "types"})
    gives = frozenset({"moe"})
    op = MOE

    def run(self, model: ir.Model, report: PassReport) -> None:
        weights = ScaledWeights(model)
        weights.rewrite()
        try:
            super().run(model, report)
        finally:
            weights.restore()

    def places(self, view: GraphView) -> list[Place]:
        return list(find_sites(view))

    def candidates(
        self, view: GraphView, place: Place, prover: Prover, region: RegionReport
    ) -> Iterator[Candidate] | Refusal | None:
        assert isinstance(place, Site)
        found = read_site(view, place)
        if isinstance(found, Refusal):
            return found
        opset = view.graph.opset_imports.get("", 0)
        if opset not in OPSETS:
            needs = f"the fused node's function body needs {OPSETS[0]} to {OPSETS[-1]}: convert the model first"
            return Refusal("opset", f"opset {opset}: {needs}", place.name)
        return self._named(found, region)

    @staticmethod
    def _named(found: Iterator[Candidate], region: RegionReport) -> Iterator[Candidate]:
        for candidate in found:
            region.form, region.nodes = candidate.form, len(candidate.region.nodes)
            yield candidate

    def notes(self, candidate: Candidate, proof: ProofReport | None) -> list[str]:
        limited = cuda_refusal(candidate.config)
        instead = "on CUDA ONNX Runtime's QMoE or the portable body runs it"
        return [] if limited is None else [f"{instead}: {limited.reason}"]
