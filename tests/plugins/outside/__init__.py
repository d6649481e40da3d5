"""A package that is none of deltafuse's: a clean-up, a recogniser of KDA in one more style, and what goes wrong."""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir
from deltafuse.custom_ops.common.refusal import Refusal
from deltafuse.fusions.candidate import Candidate
from deltafuse.fusions.fuse import FusePass, Place
from deltafuse.fusions.graph import GraphView
from deltafuse.fusions.kda.op import KDA
from deltafuse.fusions.op import FusedOp
from deltafuse.fusions.passes import Pass
from deltafuse.fusions.proof import Prover
from deltafuse.fusions.region import Region
from deltafuse.fusions.result import PassReport, RegionReport
from deltafuse.registry.ops import Op


class Tidy(Pass):
    """A clean-up: says that it was there."""

    name = "outside-tidy"

    def run(self, model: ir.Model, report: PassReport) -> None:
        report.notes.append(f"{len(model.graph)} nodes")


class MoreKda(FusePass):
    """A recogniser for an op that deltafuse has: it looks at one node and proposes nothing."""

    name = "outside-kda"
    needs = frozenset({"kda"})  # runs after deltafuse's own
    op = KDA

    def places(self, view: GraphView) -> list[Place]:
        node = next(iter(view.graph))
        return [Place("the first node", "outside", Region(list(node.outputs[:1]), [node], []), [node])]

    def candidates(
        self, view: GraphView, place: Place, prover: Prover, region: RegionReport
    ) -> Iterator[Candidate] | Refusal | None:
        return Refusal("outside", "seen, and left alone")


class Taken(MoreKda):
    """Its registration has the key of another op."""

    registration = Op("kda", "elsewhere", "Other", 1, "", "")


class NoOp(MoreKda):
    """Its op is no FusedOp."""

    op: FusedOp = object()  # type: ignore[assignment]


class Nameless(Pass):
    """It has no name for the report."""


def function() -> None:
    """No class at all."""
