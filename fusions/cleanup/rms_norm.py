"""RMS norms in all their forms, found once and remembered on their result's ``meta``.

The graph is not rewritten: dividing by a root and multiplying by its reciprocal round differently, and a model that is
not fused must keep its values to the bit. Recognisers ask :func:`rms_norm_of` and see one form.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from ..graph import GraphView, is_op
from ..match import Norm, match_norm
from ..passes import Pass
from ..result import PassReport

KEY = "deltafuse.rms_norm"


@dataclass(frozen=True)
class RmsNorm:
    """``y = x / sqrt(mean(x^2, last axis) + epsilon)``, without its weight when ``weight`` is None."""

    x: ir.Value
    y: ir.Value
    epsilon: float
    weight: ir.Value | None


class RmsNorms(Pass):
    """Annotate every RMS norm's output value."""

    name = "rms-norms"
    needs = frozenset({"folded"})
    gives = frozenset({"rms-norms"})

    def run(self, model: ir.Model, report: PassReport) -> None:
        view = GraphView(model.graph)
        for node in model.graph:
            found = find_rms_norm(view, node)
            if found is not None:
                found.y.meta[KEY] = found
                report.matched += 1


def find_rms_norm(view: GraphView, node: ir.Node) -> RmsNorm | None:
    """The RMS norm whose last node this is (before the weight, in decomposed form)."""
    native = is_op(node, "RMSNormalization") or node.op_type == "SimplifiedLayerNormalization"
    if native:
        x, weight = node.inputs[0], node.inputs[1]
        axis = node.attributes["axis"].as_int() if "axis" in node.attributes else -1
        epsilon = node.attributes["epsilon"].as_float() if "epsilon" in node.attributes else 1e-5
        rank = None if x is None or x.shape is None else len(x.shape)
        if x is None or axis not in (-1, None if rank is None else rank - 1):
            return None
        return RmsNorm(x, node.outputs[0], epsilon, weight)
    if not is_op(node, "Mul", "Div"):
        return None
    norm = match_norm(view, node)
    if isinstance(norm, Norm) and norm.kind == "rms":
        return RmsNorm(norm.numerator, node.outputs[0], norm.epsilon, None)
    return None


def rms_norm_of(value: ir.Value) -> RmsNorm | None:
    """The RMS norm that this value is the result of, if the pass found one."""
    found = value.meta.get(KEY)
    return found if isinstance(found, RmsNorm) else None
