"""The pass that finds, proves and replaces KDA blocks."""

from __future__ import annotations

from collections.abc import Iterator

from ...custom_ops.common.refusal import Refusal
from ...custom_ops.kda.spec import cuda_refusal
from ..candidate import Candidate
from ..fuse import FusePass, Place
from ..graph import GraphView, is_op
from ..proof import Prover
from ..replacement import type_refusal
from ..result import ProofReport, RegionReport
from .op import KDA
from .operands import short
from .recognise import Reading, is_near_miss, read_site
from .sites import Site, find_sites

#: Of the refusals of several readings the most telling one is reported: a layout that does not fit says least.
_TELLING = {"shape": 0, "proof": 1, "region-run": 1, "mismatch": 2, "budget": 3, "dtype": 4}


class FuseKda(FusePass):
    """Replace each proved KDA block by one call of ``deltafuse::KimiDeltaAttention``."""

    name = "fuse-kda"
    needs = frozenset({"constants", "types", "rms-norms"})
    gives = frozenset({"kda"})
    op = KDA

    def places(self, view: GraphView) -> list[Place]:
        return list(find_sites(view))

    def candidates(
        self, view: GraphView, place: Place, prover: Prover, region: RegionReport
    ) -> Iterator[Candidate] | Refusal | None:
        assert isinstance(place, Site)
        found = read_site(view, place)
        if isinstance(found, Refusal):
            return found if is_near_miss(view, place) else None
        return _screened(view, prover, found, region)

    def notes(self, candidate: Candidate, proof: ProofReport | None) -> list[str]:
        limited = cuda_refusal(candidate.config)
        return [] if limited is None else [f"on CUDA the portable body runs it: {limited.reason}"]


def _screened(
    view: GraphView, prover: Prover, readings: Iterator[Reading], region: RegionReport
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
