"""What the passes and proofs say of themselves: plain data, written to JSON and shown by the CLI."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import onnx_ir as ir

from ..custom_ops.common.refusal import Refusal

if TYPE_CHECKING:
    import onnx


@dataclass
class ProofReport:
    """One proof: a region against the op's body, on random and hostile inputs, in float32 on the CPU.

    ``error`` is the worst relative L2 error over outputs and cases; ``cases`` has each case's name, tokens,
    errors and seed; ``structure`` is the region's structural hash; ``reused`` tells that another region of the
    same structure carried the proof. ``heads``: the query heads that it was run on, when the
    region was cut down to some (or whatever else the op is cut along).
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
    heads: list[int] = field(default_factory=list)
    out_of_time: bool = False


@dataclass
class RegionReport:
    """One candidate: what it is, where, and what became of it."""

    op: str  # the op's key in registry/ops.py: "kda", "mla"
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
    #: The region's nodes, as clean-up left them: op, name, names of outputs. Not part of :meth:`FusionReport.to_dict`.
    members: list[tuple[str, str, tuple[str, ...]]] = field(default_factory=list, repr=False)


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
class QuantizedTensor:
    """One weight matrix (of all experts, where it is a stack) that was quantized.

    ``error``: relative L2 norm of the difference from the weights before; ``product_error``: of what they make of the
    inputs that a calibration saw (its rows, or its mean squares as if channels had nothing to do with each other).
    ``calibrated``: numbers were rounded by what it saw.
    """

    name: str
    group: str  # "experts" | "dense"
    scheme: str
    error: float
    bytes_before: int
    bytes_after: int  # with scales and zero points
    calibrated: bool = False
    product_error: float | None = None


@dataclass
class CachePort:
    """An input or output of the model that holds a cache."""

    name: str
    kind: str  # "input" | "output"
    dtype: str
    shape: list[int | str]

    def text(self) -> str:
        """Name, type and shape."""
        return f"{self.name} {self.dtype} [{', '.join(map(str, self.shape))}]"


@dataclass
class QuantizedCache:
    """The cache of one fused latent attention that is held in 8 bits.

    ``error``: relative L2 norm of the difference from the latents before, of the calibration's rows, else what rounding
    makes of its mean squares; None: not known. ``calibrated``: the value that the scales come from. ``unseen``: the
    channels that were zero in the calibration: they got the largest scale of the others.
    """

    node: str
    scheme: str
    before: list[CachePort]
    after: list[CachePort]
    bytes_before: int  # a token and layer, with the rotary key
    bytes_after: int
    calibrated: str = ""
    error: float | None = None
    unseen: int = 0


@dataclass
class QuantizationReport:
    """What was asked for by group, what was done, what was left alone and why; bytes of all weights of the model.

    ``algorithm``: "nearest", "aware" or "gptq" (``quantize.spec.ALGORITHMS``)."""

    schemes: dict[str, str] = field(default_factory=dict)
    calibration: str = ""
    tensors: list[QuantizedTensor] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    bytes_before: int = 0
    bytes_after: int = 0
    algorithm: str = "nearest"
    caches: list[QuantizedCache] = field(default_factory=list)


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
    quantization: QuantizationReport | None = None  # None: not asked for
    warnings: list[str] = field(default_factory=list)
    already_fused: dict[str, int] = field(default_factory=dict)  # by op: fused nodes that the source came with
    # filled in by deltafuse.fuse, which knows where the model came from and went to
    input_kind: str = "ir"  # "path" | "proto" | "ir" | "graphsurgeon"
    ir_version: int = 0  # the source's
    opsets: dict[str, int] = field(default_factory=dict)  # the source's, by domain
    source_bytes: int = 0  # 0: not from a file
    source_data_bytes: int = 0  # of its external data files
    output_bytes: int = 0
    output_data: str = ""  # the external data file beside output
    output_data_bytes: int = 0

    def count(self, op: str) -> int:
        """How many regions of this op were fused."""
        return sum(1 for r in self.regions if r.op == op and r.status.startswith("fused"))

    def to_dict(self) -> dict[str, Any]:
        """Everything but the model and the regions' nodes, as JSON-ready data."""
        model, self.model = self.model, None
        members = [region.members for region in self.regions]
        for region in self.regions:
            region.members = []
        try:
            found = {name: value for name, value in asdict(self).items() if name != "model"}
        finally:
            self.model = model
            for region, nodes in zip(self.regions, members, strict=True):
                region.members = nodes
        for entry in found["regions"]:
            del entry["members"]
        return found

    def to_json(self) -> str:
        """:meth:`to_dict` as JSON text; what is not a finite number becomes null."""
        return json.dumps(_finite(self.to_dict()), indent=2, default=str, allow_nan=False)

    def to_proto(self) -> onnx.ModelProto:
        """The new model as ``onnx.ModelProto``; external weights stay references into the source's folder.

        Raises:
            OutputError: there is no new model, or its weights do not fit into a protobuf message (2 GiB).
        """
        from ..model_io import to_proto

        return to_proto(self._new_model())

    def to_graphsurgeon(self) -> Any:
        """The new model as an ``onnx_graphsurgeon.Graph``.

        Raises:
            OutputError: there is no new model, graph-surgeon is not installed or cannot hold the model.
        """
        from ..model_io import to_graphsurgeon

        return to_graphsurgeon(self._new_model())

    def result(self) -> Any:
        """The new model as the kind that was given: ``ModelProto``, graph-surgeon ``Graph``, else ``onnx_ir.Model``."""
        convert = {"proto": self.to_proto, "graphsurgeon": self.to_graphsurgeon}
        return convert.get(self.input_kind, self._new_model)()

    def _new_model(self) -> ir.Model:
        if self.model is None:
            from ..errors import OutputError

            raise OutputError("this report holds no new model: it was a dry run")
        return self.model


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value
