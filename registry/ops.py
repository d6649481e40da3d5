"""The ops that deltafuse recognises and fuses."""

from __future__ import annotations

from dataclasses import dataclass

from ..custom_ops.kda import spec as kda
from ..custom_ops.mla import spec as mla
from ..custom_ops.moe import spec as moe


@dataclass(frozen=True)
class Op:
    """One fused op.

    Attributes:
        key: its short name, used by ``require``, the reports and the CLI.
        domain, op_type, version: the ONNX identity of the function that a fused node calls.
        spec: the module under ``deltafuse`` that defines inputs, outputs, attributes, limits and tolerances.
        summary: one line for people.
    """

    key: str
    domain: str
    op_type: str
    version: int
    spec: str
    summary: str

    @property
    def qualified_name(self) -> str:
        return f"{self.domain}::{self.op_type}"


OPS: dict[str, Op] = {
    "kda": Op(
        key="kda",
        domain=kda.DOMAIN,
        op_type=kda.OP_TYPE,
        version=kda.VERSION,
        spec="custom_ops.kda.spec",
        summary="Kimi Delta Attention: the gated delta rule with a decay for every key channel",
    ),
    "mla": Op(
        key="mla",
        domain=mla.DOMAIN,
        op_type=mla.OP_TYPE,
        version=mla.VERSION,
        spec="custom_ops.mla.spec",
        summary="multi-head latent attention, with or without an output gate",
    ),
    "moe": Op(
        key="moe",
        domain=moe.DOMAIN,
        op_type=moe.OP_TYPE,
        version=moe.VERSION,
        spec="custom_ops.moe.spec",
        summary="mixture of experts: group-limited routing, quantized experts, shared expert",
    ),
}

#: The domains of deltafuse's own ops; an op of another package has one of its own.
OWN_DOMAINS = frozenset(op.domain for op in OPS.values())


def register(op: Op) -> None:
    """Add an op of another package (``fusions/plugins.py``). The same one again changes nothing.

    Raises:
        ValueError: the key or the ONNX identity is taken, or the domain is deltafuse's or ONNX's.
    """
    if OPS.get(op.key) == op:
        return
    if op.key in OPS:
        raise ValueError(f"the key {op.key!r} is that of {OPS[op.key].qualified_name}")
    if op.domain in OWN_DOMAINS or op.domain in ("", "ai.onnx", "com.microsoft"):
        raise ValueError(f"the domain {op.domain!r} is not free: an op of another package has a domain of its own")
    if any(op.qualified_name == other.qualified_name for other in OPS.values()):
        raise ValueError(f"there is an op {op.qualified_name} already")
    OPS[op.key] = op
