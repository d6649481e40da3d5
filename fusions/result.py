"""What the passes and proofs say of themselves: plain data, written to JSON and shown by the CLI."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

import onnx_ir as ir

from ..custom_ops.common.refusal import Refusal


@dataclass
class ProofReport:
    """One proof: a region against the op's body, on random and hostile inputs, in float32 on the CPU.

    ``error`` is the worst relative L2 error over outputs and cases; ``cases`` has each case's name, tokens,
    errors and seed; ``structure`` is the region's structural hash; ``reused`` tells that another region of the
    same structure carried the proof.
    """

    proved: bool
    error: float = float("nan")
    tolerance: float = float("nan")
    seed: int = 0
    seconds: float = 0.0
    structure: str = ""
    reused: bool = False
    reason: str = ""
    cases: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class RegionReport:
    """One candidate: what it is, where, and what became of it."""

    op: str  # "kda"
    name: str  # the layer's scope where there is one, else the anchor node's name or position
    status: str  # "fused" | "fused-unproved" | "recognised" (dry run, inspect) | "refused"
    nodes: int = 0  # nodes of the region, subgraphs counted
    form: str = ""  # "chunked", "recurrent", "unrolled", "scan", "loop", "linear-attention"
    refusal: Refusal | None = None
    config: dict[str, Any] = field(default_factory=dict)
    absorbed: list[str] = field(default_factory=list)
    not_absorbed: list[Refusal] = field(default_factory=list)
    proof: ProofReport | None = None
    notes: list[str] = field(default_factory=list)  # repairs and remarks


@dataclass
class PassReport:
    """One pass: did it change anything, how often, what it refused, how long it took."""

    name: str
    changed: bool = False
    matched: int = 0
    seconds: float = 0.0
    refused: list[Refusal] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass
class FusionReport:
    """All that `deltafuse.fuse` did. ``model`` is the new model, an ``onnx_ir.Model`` (the user's own is unchanged)."""

    model: ir.Model | None = None
    source: str = ""
    output: str = ""
    target: str = "plugin"
    verify: bool = True
    dry_run: bool = False
    deltafuse_version: str = ""
    nodes_before: int = 0
    nodes_after: int = 0
    seconds: float = 0.0
    regions: list[RegionReport] = field(default_factory=list)
    passes: list[PassReport] = field(default_factory=list)
    repairs: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def count(self, op: str) -> int:
        """How many regions of this op were fused."""
        return sum(1 for r in self.regions if r.op == op and r.status.startswith("fused"))

    def to_dict(self) -> dict[str, Any]:
        """Everything but the model, as JSON-ready data."""
        model, self.model = self.model, None
        try:
            return asdict(self)
        finally:
            self.model = model

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2, default=str)
