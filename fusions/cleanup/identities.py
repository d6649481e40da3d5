"""Identities: nodes that hand a value on unchanged."""

from __future__ import annotations

import onnx_ir as ir
import onnx_ir.passes.common as common

from ..passes import Pass
from ..result import PassReport


class RemoveIdentities(Pass):
    """Remove `Identity` nodes wherever the names of graph inputs and outputs allow it."""

    name = "remove-identities"
    gives = frozenset({"identities"})

    def run(self, model: ir.Model, report: PassReport) -> None:
        before = model.graph.num_nodes()
        report.changed = bool(common.IdentityEliminationPass()(model).modified)
        report.matched = before - model.graph.num_nodes()
