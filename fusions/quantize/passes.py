"""The passes that quantize: an opset that has the forms, before fusing; the weights, after it."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir
import onnx_ir.passes.common as common

from ...custom_ops.common.parts_tensor import SpillFile
from ...custom_ops.common.quantize_matrix import Statistics
from ...custom_ops.common.refusal import Refusal
from ...custom_ops.common.scheme import Scheme
from ..mla.quantized_cache import FEW_TOKENS, CalibrationError, SeenChannels, quantize_caches
from ..passes import Pass, Progress
from ..result import PassReport, QuantizationReport
from ..rewrite import remove_unused
from .dense import MIN_ELEMENTS, needed_opset, quantize_dense
from .experts import quantize_experts
from .initializers import Sources, names_of, weight_bytes
from .opset import raise_opset
from .spec import QuantizeError

#: ONNX's first opset, and format, with float8.
FLOAT8_OPSET, FLOAT8_IR = 19, 9
#: What a group's weights are, for a report in which there are none.
_NEEDS = {
    "experts": "no fused GroupedQMoE node has weights of 16 or 32 bits",
    "dense": f"no MatMul or Gemm has a constant weight of {MIN_ELEMENTS:,} elements or more",
}


class RaiseOpset(Pass):
    """Before anything is recognised: function bodies are written for the model's opset."""

    name = "raise-opset"

    def __init__(self, schemes: Mapping[str, Scheme]) -> None:
        self.wanted = needed_opset(schemes["dense"]) if "dense" in schemes else 0
        if "cache" in schemes and schemes["cache"].kind == "float8":
            self.wanted = max(self.wanted, FLOAT8_OPSET)

    def run(self, model: ir.Model, report: PassReport) -> None:
        had = raise_opset(model, self.wanted)
        if had < self.wanted:
            report.changed = True
            report.notes.append(f"opset {had} raised to {self.wanted}, which the quantized tensors need")


class Quantize(Pass):
    """Experts of fused nodes, then other large weights; then caches of latents."""

    name = "quantize"

    def __init__(
        self,
        schemes: Mapping[str, Scheme],
        statistics: Mapping[str, Statistics] | None = None,
        progress: Progress | None = None,
        sources: Sources | None = None,
        channels: Mapping[str, SeenChannels] | None = None,
    ) -> None:
        """
        Args:
            schemes: by group (``spec.GROUPS``).
            statistics: of activations, by their value's name, or None.
            progress: called with (what, done, total).
            sources: the files that the weights are read from.
            channels: what a calibration saw of the values' channels, for caches.
        """
        self.schemes, self.statistics, self.progress = dict(schemes), statistics or {}, progress
        self.sources, self.channels = sources, {} if channels is None else channels
        self.result = QuantizationReport({group: str(scheme) for group, scheme in schemes.items()})

    def run(self, model: ir.Model, report: PassReport) -> None:
        names, result = names_of(model), self.result
        left: set[str] = set()  # groups of which something was left as it was, with the reason
        result.bytes_before = weight_bytes(model)

        def told(group: str) -> dict[str, object]:
            def step(done: int, total: int) -> None:
                if self.progress is not None:
                    self.progress(f"quantize {group}", done, total)

            def log(reason: str) -> None:
                left.add(group)
                report.notes.append(reason)

            return {"names": names, "log": log, "progress": step}

        spill = SpillFile()
        if "experts" in self.schemes:
            result.tensors += quantize_experts(
                model,
                self.schemes["experts"],
                self.statistics,
                spill,
                sources=self.sources,
                **told("experts"),  # type: ignore[arg-type]
            )
        if "dense" in self.schemes:
            result.tensors += quantize_dense(
                model,
                self.schemes["dense"],
                self.statistics,
                spill,
                sources=self.sources,
                **told("dense"),  # type: ignore[arg-type]
            )
        if "cache" in self.schemes:
            self._caches(model, report)
        remove_unused(model)
        common.RemoveUnusedFunctionsPass()(model)
        for group in self.schemes:
            if group != "cache" and not any(tensor.group == group for tensor in result.tensors):
                nothing = f"{group}: there was nothing to quantize: {_NEEDS[group]}"
                report.notes.append(f"{group}: nothing was quantized" if group in left else nothing)
        result.notes = list(report.notes)
        result.bytes_after = weight_bytes(model)
        report.matched = len(result.tensors) + len(result.caches)
        report.changed = report.matched > 0

    def _caches(self, model: ir.Model, report: PassReport) -> None:
        scheme = self.schemes["cache"]
        left: list[str] = []
        try:
            for found in quantize_caches(model, scheme.kind, str(scheme), self.channels, names_of(model)):
                if isinstance(found, Refusal):
                    report.refused.append(found)
                    left.append(f"cache: {found}")
                else:
                    self.result.caches.append(found)
                    known = self.channels.get(found.calibrated) if found.calibrated else None
                    if known is not None and known.count is not None and known.count < FEW_TOKENS:
                        report.notes.append(
                            f"cache: the calibration saw few tokens of {found.node} ({known.count}): what is larger "
                            "than they were is cut off, calibrate on more"
                        )
        except CalibrationError as error:
            raise QuantizeError(str(error)) from error
        if not self.result.caches:
            raise QuantizeError("; ".join(left) or "cache: no fused LatentAttention node keeps a cache")
        if scheme.kind == "float8":
            model.ir_version = max(model.ir_version or 0, FLOAT8_IR)
        report.notes += left
