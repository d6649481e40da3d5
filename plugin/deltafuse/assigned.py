"""Which node of a session runs where: plain data, and how it reads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from .custom_ops.kda.spec import DOMAIN
from .discovery import EP_NAME


@dataclass(frozen=True)
class NodeAssignment:
    """One node.

    Attributes:
        ep: the EP that runs it; "" for a deltafuse node that the plugin EP did not take.
        domain: its domain, "" for ONNX's own.
        op_type: its operator.
        name: its name, may be ""; for a refused node without a name, its first output.
        reason: why the plugin EP did not take it, "" otherwise.
        runs_as: onnxruntime's op that runs in its place, and where; "" where its ONNX body was inlined instead.
    """

    ep: str
    domain: str
    op_type: str
    name: str
    reason: str = ""
    runs_as: str = ""

    def __str__(self) -> str:
        op = f"{self.domain}::{self.op_type}" if self.domain else self.op_type
        where = self.ep or f"{self.runs_as or 'inlined'} ({self.reason})"
        return f"{op} {self.name!r}: {where}"


class Assignment(list[NodeAssignment]):
    """All nodes of a session after partitioning, and the deltafuse nodes that were refused.

    Attributes:
        note: why the plugin EP is not in the session, or why a GPU was left alone; "" otherwise.
    """

    def __init__(self, nodes: Iterable[NodeAssignment] = (), *, note: str = "") -> None:
        super().__init__(nodes)
        self.note = note

    @property
    def refused(self) -> list[NodeAssignment]:
        """The deltafuse nodes that the plugin EP does not run."""
        return [node for node in self if not node.ep]

    @property
    def fused(self) -> list[NodeAssignment]:
        """The nodes that the plugin EP runs."""
        return self.on(EP_NAME)

    def on(self, ep: str) -> list[NodeAssignment]:
        """The nodes that this EP runs."""
        return [node for node in self if node.ep == ep]

    def counts(self) -> dict[str, int]:
        """Number of nodes by EP; refused ones under ""."""
        return dict(Counter(node.ep for node in self))

    def __str__(self) -> str:
        lines = [f"{ep or 'refused by the plugin'}: {count} nodes" for ep, count in self.counts().items()]
        lines += [f"  {node}" for node in self if node.domain == DOMAIN]
        return "\n".join(([self.note] if self.note else []) + lines)


def model_calls(session: Any) -> Iterator[tuple[str, str, str]]:
    """The deltafuse nodes in the model of a session: domain, operator, name (or first output)."""
    import onnx

    path: str | None = getattr(session, "_model_path", None)
    data: bytes = getattr(session, "_model_bytes", None) or b""
    try:
        model = onnx.load(path, load_external_data=False) if path else onnx.load_from_string(data)
    except Exception:  # not an ONNX file (ORT's own format): it cannot be asked
        return
    yield from _calls(onnx, model.graph)


def _calls(onnx: Any, graph: Any) -> Iterator[tuple[str, str, str]]:
    for node in graph.node:
        if node.domain == DOMAIN:
            yield node.domain, node.op_type, node.name or next(iter(node.output), "")
        for attribute in node.attribute:
            for inner in [attribute.g] if attribute.type == onnx.AttributeProto.GRAPH else attribute.graphs:
                yield from _calls(onnx, inner)
