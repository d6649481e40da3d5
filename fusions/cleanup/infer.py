"""Types and shapes: filled in where an exporter, or a tool after it, left none."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import onnx_ir as ir
import onnx_ir.passes.common as common

from ..passes import Pass
from ..result import PassReport

#: ORT's ops whose first output has the shape and type of their first input; onnx's inference does not know them.
_LIKE_INPUT = frozenset(
    {
        "QuickGelu",
        "Gelu",
        "FastGelu",
        "BiasGelu",
        "SimplifiedLayerNormalization",
        "SkipSimplifiedLayerNormalization",
        "GatedRMSNorm",
    }
)


def _makes_no_tensor(op_type: str) -> bool:
    return op_type.startswith(("SplitToSequence", "SequenceConstruct", "SequenceEmpty", "SequenceInsert", "Optional"))


class InferTypes(Pass):
    """Run onnx's shape inference when values have no type or shape; known ones are kept."""

    gives = frozenset({"types"})

    def __init__(self, name: str = "infer-types") -> None:
        self.name = name

    def run(self, model: ir.Model, report: PassReport) -> None:
        missing = _unknown(model)
        if not missing:
            return
        stopped = infer(model)
        if stopped:
            report.notes.append(stopped)
        after = _unknown(model)
        report.matched = missing - after
        report.changed = report.matched > 0
        if after:
            report.notes.append(f"{after} values stay without a type or shape")


def infer(model: ir.Model) -> str:
    """Run onnx's shape inference; gives why it stopped, or "". It is a help, not a need: recognisers cope with unknown
    shapes. What the model promises of its outputs stays."""
    promised = [(v, v.shape) for v in model.graph.outputs if v.shape is not None]
    sequences = [(v, v.type, v.shape) for n in model.graph if _makes_no_tensor(n.op_type) for v in n.outputs]
    stopped = ""
    with _stand_ins(model):
        try:
            common.ShapeInferencePass(check_type=False, strict_mode=False, data_prop=True)(model)
        except Exception as error:
            stopped = f"shape inference stopped: {str(error).splitlines()[0][:200]}"
    for value, kind, shape in sequences:  # inference gives them their elements' type
        value.type, value.shape = kind, shape
    for value, promise in promised:
        value.shape = promise
    return stopped


def _unknown(model: ir.Model) -> int:
    return sum(1 for n in model.graph for v in n.outputs if v.name and (v.dtype is None or v.shape is None))


@contextmanager
def _stand_ins(model: ir.Model) -> Iterator[None]:
    """While it lasts, ORT's shape-keeping ops look like the standard `Relu`, which inference knows."""
    logger = logging.getLogger("onnx_ir.passes.common.shape_inference")
    level, disabled = logger.level, []
    logger.setLevel(logging.CRITICAL)
    for node in model.graph:
        if node.op_type in _LIKE_INPUT and node.inputs and len([v for v in node.outputs if v.uses()]) <= 1:
            disabled.append((node, node.domain, node.op_type, list(node.inputs), dict(node.attributes)))
            node.domain, node.op_type = "", "Relu"
            node.attributes.clear()
            node.resize_inputs(1)
    try:
        yield
    finally:
        logger.setLevel(level)
        for node, domain, op_type, inputs, attributes in disabled:
            node.domain, node.op_type = domain, op_type
            node.attributes.update(attributes)
            node.resize_inputs(len(inputs))
            for i, value in enumerate(inputs):
                if node.inputs[i] is not value:
                    node.replace_input_with(i, value)
