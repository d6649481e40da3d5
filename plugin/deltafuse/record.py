"""What a model says of deltafuse: the fused nodes that are in it, and its ``metadata_props``."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from .fusions.result import FusionReport
from .registry.ops import OPS

if TYPE_CHECKING:
    import onnx_ir as ir


def already_fused(model: ir.Model) -> dict[str, int]:
    """Op key -> how many fused nodes a model has, subgraphs included; ops that it has none of are left out."""
    keys = {(op.domain, op.op_type): key for key, op in OPS.items()}
    nodes = model.graph.all_nodes()
    return dict(Counter(keys[n.domain, n.op_type] for n in nodes if (n.domain, n.op_type) in keys))


def record_metadata(report: FusionReport) -> None:
    """Say in the new model's ``metadata_props`` what deltafuse did to it, now and in earlier runs."""
    assert report.model is not None
    new = {op: report.count(op) for op in OPS}
    counts = {op: count + report.already_fused.get(op, 0) for op, count in new.items()}
    unproved = "false: --no-verify"
    before = report.model.metadata_props.get("deltafuse.verified") if report.already_fused else None
    now = ("true" if report.verify else unproved) if any(new.values()) else None
    verified = unproved if unproved in (before, now) else now or before or "nothing fused"
    report.model.metadata_props.update(
        {
            "deltafuse.version": report.deltafuse_version,
            "deltafuse.target": report.target,
            "deltafuse.verified": verified,
            "deltafuse.fused": ", ".join(f"{op}={count}" for op, count in counts.items()),
        }
    )
