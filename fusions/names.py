"""Names for reports."""

from __future__ import annotations

import ast

import onnx_ir as ir

from .graph import GraphView


def name_of(anchor: ir.Node, view: GraphView) -> str:
    """The module scope of the anchor where the exporter left one, else its name, else its place."""
    scopes = anchor.metadata_props.get("pkg.torch.onnx.name_scopes")
    if scopes:
        try:
            parts = [s for s in ast.literal_eval(scopes) if isinstance(s, str) and s]
        except (ValueError, SyntaxError):
            parts = []
        named = [p for p in parts if "." in p or p.isidentifier()]
        if len(named) > 1:
            # the innermost module that is not the operation itself
            return named[-2]
    if anchor.name:
        return anchor.name
    return f"{anchor.op_type}@{view.position[anchor]}"
