"""Repair of what an exporter got wrong and what keeps a model from loading."""

from __future__ import annotations

import onnx_ir as ir

from ..graph import is_op
from ..passes import Pass
from ..result import PassReport

_HALF = (ir.DataType.BFLOAT16, ir.DataType.FLOAT16)


class RepairNormScale(Pass):
    """`RMSNormalization` of a 16-bit value with a float32 scale: compute in float32, as the exporter's source did.

    torch.onnx exports ``F.rms_norm(x.bfloat16(), weight.float())`` as one node whose input and scale differ in type,
    with a float32 result. ONNX Runtime refuses to load it ("Mul bound to different types"). A cast of the input to
    float32 makes it right: input, scale and result are float32 then.
    """

    name = "repair-norm-scale"
    needs = frozenset({"types"})

    def run(self, model: ir.Model, report: PassReport) -> None:
        taken = {v.name for n in model.graph for v in n.outputs}
        for node in list(model.graph):
            if not is_op(node, "RMSNormalization") or len(node.inputs) < 2:
                continue
            x, scale = node.inputs[0], node.inputs[1]
            if x is None or scale is None or x.dtype not in _HALF or scale.dtype != ir.DataType.FLOAT:
                continue
            name = f"{x.name}_float32"
            while name in taken:
                name += "_"
            taken.add(name)
            cast = ir.node(
                "Cast", [x], {"to": ir.DataType.FLOAT.value}, name=f"{node.name or node.outputs[0].name}_cast"
            )
            wide = cast.outputs[0]
            wide.name, wide.shape, wide.dtype = name, x.shape, ir.DataType.FLOAT
            model.graph.insert_before(node, cast)
            node.replace_input_with(0, wide)
            node.outputs[0].dtype = ir.DataType.FLOAT
            report.matched += 1
            report.notes.append(
                f"RMSNormalization {node.name!r}: {x.dtype} input with a float32 scale, which ONNX Runtime does not "
                "load; now computed in float32"
            )
        report.changed = report.matched > 0
