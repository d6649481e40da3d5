"""What other tools do to a model before it reaches deltafuse: each takes a model and gives a new one."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable
from pathlib import Path

import onnx
import onnx.version_converter
import onnx_ir as ir
import onnxruntime as ort


def optimize_for_ort(model: onnx.ModelProto) -> onnx.ModelProto:
    """onnxscript's fusions for ORT."""
    from onnxscript.rewriter import ort_fusions

    made, _ = ort_fusions.optimize_for_ort(ir.from_proto(model))
    return ir.to_proto(made)


def onnxscript_optimize(model: onnx.ModelProto) -> onnx.ModelProto:
    """onnxscript's constant folding and general clean-up."""
    from onnxscript import optimizer

    return optimizer.optimize(model)


def onnxscript_converted(model: onnx.ModelProto) -> onnx.ModelProto:
    """onnxscript's version converter, to opset 23."""
    from onnxscript import version_converter

    made = ir.from_proto(model)
    version_converter.convert_version(made, 23)
    return ir.to_proto(made)


def onnx_converted(model: onnx.ModelProto) -> onnx.ModelProto:
    """onnx's own version converter, to opset 23: all metadata is lost."""
    return onnx.version_converter.convert_version(model, 23)


def ort_optimized(level: ort.GraphOptimizationLevel) -> Callable[[onnx.ModelProto], onnx.ModelProto]:
    """The model that ORT saves after its own optimisation at this level."""

    def optimized(model: onnx.ModelProto) -> onnx.ModelProto:
        options = ort.SessionOptions()
        options.graph_optimization_level = level
        options.log_severity_level = 3
        with tempfile.TemporaryDirectory() as folder:
            options.optimized_model_filepath = str(Path(folder, "optimized.onnx"))
            ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
            return onnx.load(options.optimized_model_filepath)

    return optimized


def surgeon_folded(model: onnx.ModelProto) -> onnx.ModelProto:
    """onnx-graphsurgeon's import, clean-up and export."""
    import onnx_graphsurgeon as gs

    logging.getLogger("onnx_graphsurgeon").setLevel(logging.ERROR)
    graph = gs.import_onnx(model)
    return gs.export_onnx(graph.cleanup().toposort())


def functions_outlined(model: onnx.ModelProto) -> onnx.ModelProto:
    """Every Sigmoid and Softplus behind a model-local function of someone else's domain."""
    made = onnx.ModelProto()
    made.CopyFrom(model)
    version = next(o.version for o in made.opset_import if not o.domain)
    for op in ("Sigmoid", "Softplus"):
        body = onnx.helper.make_node(op, ["x"], ["y"])
        opsets = [onnx.helper.make_opsetid("", version)]
        made.functions.append(onnx.helper.make_function("other.tools", f"My{op}", ["x"], ["y"], [body], opsets))
        for node in made.graph.node:
            if node.op_type == op and not node.domain:
                node.op_type, node.domain = f"My{op}", "other.tools"
    made.opset_import.append(onnx.helper.make_opsetid("other.tools", 1))
    return made


_LEVEL = ort.GraphOptimizationLevel
TOOLS: dict[str, Callable[[onnx.ModelProto], onnx.ModelProto]] = {
    "optimize_for_ort": optimize_for_ort,
    "onnxscript_optimize": onnxscript_optimize,
    "onnxscript_converted": onnxscript_converted,
    "onnx_converted": onnx_converted,
    "ort_basic": ort_optimized(_LEVEL.ORT_ENABLE_BASIC),
    "ort_extended": ort_optimized(_LEVEL.ORT_ENABLE_EXTENDED),
    "ort_all": ort_optimized(_LEVEL.ORT_ENABLE_ALL),
    "surgeon": surgeon_folded,
    "functions": functions_outlined,
}
