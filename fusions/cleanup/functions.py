"""Model-local functions: their bodies are brought into the graph, so that blocks which use them can be seen."""

from __future__ import annotations

import onnx_ir as ir
import onnx_ir.passes.common as common

from ...custom_ops.kda.spec import DOMAIN
from ..passes import Pass
from ..result import PassReport


class InlineLocalFunctions(Pass):
    """Inline the model's own functions; calls of deltafuse's functions, from an earlier run, stay calls."""

    name = "inline-local-functions"

    def run(self, model: ir.Model, report: PassReport) -> None:
        others = [f for f in model.functions.values() if f.domain != DOMAIN]
        if not others:
            return
        before = model.graph.num_nodes()
        common.InlinePass(criteria=lambda f: f.domain != DOMAIN)(model)
        common.RemoveUnusedFunctionsPass()(model)
        report.matched, report.changed = len(others), True
        names = ", ".join(sorted({f"{f.domain}::{f.name}" for f in others})[:8])
        report.notes.append(
            f"{len(others)} functions inlined ({names}): {before} nodes are {model.graph.num_nodes()} now"
        )
