"""The pass that finds, proves and replaces latent attention."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import onnx_ir as ir

from ...custom_ops.common.refusal import Refusal
from ...custom_ops.mla.spec import cuda_refusal
from ..candidate import Candidate
from ..fuse import FusePass, Place
from ..graph import GraphView
from ..names import name_of
from ..proof import Prover
from ..region import backward
from ..replacement import type_refusal
from ..result import PassReport, ProofReport, RegionReport
from .block import Block, read_block
from .core import Core, is_anchor, read_core
from .equal import merge_equal
from .lengths import spell_lengths
from .op import MLA
from .plain import Plain
from .recognise import candidates, readable_masks
from .sizes import size_refusal
from .symbolic import Symbolic

#: Readings tried at one place before it is given up.
MAX_READINGS = 24


@dataclass
class Site(Place):
    """An attention and what was read around it."""

    block: Block | None = None
    refusal: Refusal | None = None


class FuseMla(FusePass):
    """Replace each proved block by one call of ``deltafuse::LatentAttention``."""

    name = "fuse-mla"
    needs = frozenset({"constants", "types", "rms-norms"})
    gives = frozenset({"mla"})
    op = MLA

    def run(self, model: ir.Model, report: PassReport) -> None:
        if any(is_anchor(n) for n in model.graph):
            merge_equal(model.graph)
            spell_lengths(model.graph)
            plain = Plain(model.graph)
            plain.make()
            super().run(model, report)
            plain.restore()

    def places(self, view: GraphView) -> list[Place]:
        found: list[Place] = []
        self._symbolic = Symbolic(view)
        for node in view.graph:
            if not is_anchor(node):
                continue
            core = read_core(view, node)
            if core is None:
                continue
            block = core if isinstance(core, Refusal) else read_block(view, self._symbolic, core)
            if block is None:
                continue
            name = name_of(node, view)
            if isinstance(block, Refusal):
                region = backward(view, [node.outputs[0]])
                found.append(Site(name, "", region, [node], refusal=block))
                continue
            region = backward(view, [block.end.x])
            found.append(Site(name, _form(block.core), region, [node], block=block))
        return found

    def candidates(
        self, view: GraphView, place: Place, prover: Prover, region: RegionReport
    ) -> Iterator[Candidate] | Refusal | None:
        assert isinstance(place, Site)
        if place.refusal is not None or place.block is None:
            return place.refusal
        return self._screened(view, prover, place, region)

    def _screened(self, view: GraphView, prover: Prover, place: Site, region: RegionReport) -> Iterator[Candidate]:
        assert place.block is not None
        count = -1
        for count, candidate in enumerate(candidates(view, self._symbolic, place.block, place.name, place.form)):
            if count >= MAX_READINGS:
                return
            refused = type_refusal(candidate) or size_refusal(view, candidate, _looked_up(candidate))
            measured = refused or prover.screen(candidate)
            if isinstance(measured, Refusal):
                region.refusal = region.refusal or measured
                if measured.code == "budget":
                    return
                continue
            region.refusal = None
            yield candidate
        if count < 0 and not readable_masks(view, self._symbolic, place.block):
            region.refusal = Refusal(
                "mask",
                "its masks are neither causal, sliding or padding masks of minus infinity, nor one tensor of four axes",
                place.name,
            )

    def notes(self, candidate: Candidate, proof: ProofReport | None) -> list[str]:
        limited = cuda_refusal(candidate.config)
        return [] if limited is None else [f"on CUDA the portable body runs it: {limited.reason}"]


def _looked_up(candidate: Candidate) -> bool:
    """Is the mask [batch, keys], looked up by the key's place?"""
    return "attn_mask" in candidate.operands and len(candidate.operands["attn_mask"].pieces[0].axes) == 2


def _form(core: Core) -> str:
    return {"attention": "attention-op", "softmax": "decomposed"}.get(core.form, core.form)
