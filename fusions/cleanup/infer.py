"""Types and shapes: filled in where an exporter, or a tool after it, left none."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import onnx_ir as ir
import onnx_ir.passes.common as common

from ..dims import symbol
from ..graph import attribute_int, is_op
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


#: Where a model notes what it looked like after its shapes were inferred, from what was known, and anew.
_INFERRED, _REOPENED = "deltafuse.inferred", "deltafuse.reopened"


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
    shapes. What the model promises of its outputs stays. A model that has not changed since is left as it is: on large
    graphs inference is most of what a clean-up pass takes."""
    if model.meta.get(_INFERRED) == look(model):
        return ""
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
    model.meta[_INFERRED] = look(model)
    return stopped


def look(model: ir.Model) -> int:
    """A number that changes with the graph and with what is known of its shapes."""
    parts = []
    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        shapes = tuple(
            (v.dtype, None if v.shape is None else tuple(None if is_inferred(d) else str(d) for d in v.shape))
            for v in node.outputs
        )
        inputs = tuple((id(v), v is not None and v.const_value is not None) for v in node.inputs)
        parts.append((id(node), node.op_type, node.domain, inputs, shapes, tuple(node.attributes)))
    return hash(tuple(parts))


def infer_open(model: ir.Model) -> None:
    """Infer anew the shapes that have sizes which an inference before gave names of its own: what was computed then may
    be constant now. Where nothing better is found, these sizes have no name any more."""
    if model.meta.get(_REOPENED) == look(model):
        return
    _infer_open(model)
    if _keep_uncut(model):
        _infer_open(model)
    _say_products(model)
    infer(model)  # what was put back, or said, tells more
    model.meta[_REOPENED] = look(model)


def _say_products(model: ir.Model) -> None:
    """Say the sizes of ORT's products with operands turned over, which inference does not know."""
    for node in model.graph:
        if node.op_type != "FusedMatMul" or node.domain != "com.microsoft" or node.outputs[0].shape is not None:
            continue
        a, b = node.inputs[:2]
        if a is None or b is None or a.shape is None or b.shape is None or min(len(a.shape), len(b.shape)) < 2:
            continue
        if any(attribute_int(node, f"transBatch{side}", 0) for side in "AB"):
            continue
        left, right = list(a.shape), list(b.shape)
        rows = left[-1 if attribute_int(node, "transA", 0) else -2]
        columns = right[-2 if attribute_int(node, "transB", 0) else -1]
        front, other = sorted((left[:-2], right[:-2]), key=len, reverse=True)
        for i, dim in enumerate(reversed(other)):
            if front[-1 - i] == 1:
                front[-1 - i] = dim
        value = node.outputs[0]
        value.shape = ir.Shape([*front, rows, columns])
        value.type = value.type or a.type


def _keep_uncut(model: ir.Model) -> bool:
    """Say the sizes of axes that a `Slice` does not cut: inference gives none where it does not know the others."""
    changed = False
    for node in model.graph:
        axes = node.inputs[3] if is_op(node, "Slice") and len(node.inputs) > 3 else None
        source, result = node.inputs[0] if node.inputs else None, node.outputs[0]
        tensor = None if axes is None else axes.const_value
        if tensor is None or source is None or source.shape is None or result.is_graph_output():
            continue
        rank = len(source.shape)
        cut = {int(a) % rank for a in tensor.numpy().reshape(-1)}
        before: list[int | ir.SymbolicDim | None] = [None] * rank if result.shape is None else list(result.shape)
        dims = list(before)
        for i, (was, whole) in enumerate(zip(before, source.shape, strict=True)):
            known = isinstance(whole, int) or (symbol(whole) is not None and not is_inferred(whole))
            if known and i not in cut and (was is None or symbol(was) is None or is_inferred(was)):
                dims[i] = was if isinstance(was, int) else whole
        if dims != before:
            result.shape, changed = ir.Shape(dims), True
    return changed


def _infer_open(model: ir.Model) -> None:
    open_: dict[ir.Value, ir.Shape] = {}
    for value in (v for n in model.graph for v in n.outputs):
        if value.shape is not None and any(is_inferred(d) for d in value.shape) and not value.is_graph_output():
            open_[value] = ir.Shape([None if is_inferred(d) else d for d in value.shape])
            value.shape = None
    if open_:
        infer(model)
    for value, shape in open_.items():
        if value.shape is None or len(value.shape) != len(shape):
            value.shape = shape
            continue
        # what was known of the other sizes stays so: ``SpellSizes`` knows more than inference
        dims = [old if isinstance(old, int) else new for old, new in zip(shape, value.shape, strict=True)]
        if dims != list(value.shape):
            value.shape = ir.Shape(dims)


def is_inferred(dim: int | ir.SymbolicDim | None) -> bool:
    """Is it a size that onnx's inference gave a name of its own?"""
    return str(symbol(dim) or "").startswith("unk__")


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
