"""The ops that deltafuse recognises and fuses."""

from __future__ import annotations

from dataclasses import dataclass

from ..custom_ops.kda import spec as kda
from ..custom_ops.mla import spec as mla


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
}
