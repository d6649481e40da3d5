"""Types and shapes: filled in where an exporter, or a tool after it, left none."""

from __future__ import annotations

import onnx_ir as ir
import onnx_ir.passes.common as common

from ..passes import Pass
from ..result import PassReport


class InferTypes(Pass):
    """Run onnx's shape inference when values have no type or shape; known ones are kept."""

    name = "infer-types"
    gives = frozenset({"types"})

    def run(self, model: ir.Model, report: PassReport) -> None:
        missing = sum(1 for n in model.graph for v in n.outputs if v.name and (v.dtype is None or v.shape is None))
        if not missing:
            return
        try:
            common.ShapeInferencePass(check_type=False, strict_mode=False, data_prop=True)(model)
        except Exception as error:  # inference is a help, not a need: recognisers cope with unknown shapes
            report.notes.append(f"shape inference stopped: {str(error).splitlines()[0][:200]}")
        after = sum(1 for n in model.graph for v in n.outputs if v.name and (v.dtype is None or v.shape is None))
        report.matched = missing - after
        report.changed = report.matched > 0
        if after:
            report.notes.append(f"{after} values stay without a type or shape")
