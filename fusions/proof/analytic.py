"""Is a region made of analytic functions only?

Then it can't tell inputs apart that the proof never draws: two analytic functions that agree on an open set of inputs
agree everywhere. A clamp, a comparison or a rounding could be invisible on all drawn inputs and matter on others, so a
region that has one outside a recognised block (a softplus with its linear branch, a norm with its floor, an exponent of
decays held at 0) is not proved.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ..candidate import Candidate
from ..graph import FLOAT_TYPES, GraphView, is_op, subgraphs_of
from ..match import match_norm, match_softplus, radicand
from ..region import backward
from .extract import Extract

#: Analytic in their float inputs where they are defined.
_ANALYTIC = frozenset(
    "Add Cast CastLike Cos CumSum Div Einsum Erf Exp Gelu Gemm Identity LinearAttention Log MatMul Mul Neg Pow "
    "QuickGelu Reciprocal ReduceL2 ReduceLogSumExp ReduceMean ReduceSum ReduceSumSquare Sigmoid Sin Softplus Sqrt Sub "
    "Sum Swish Tanh CausalConvWithState Conv FusedMatMul LpNormalization RMSNormalization SimplifiedLayerNormalization "
    "GatedRMSNorm LayerNormalization".split()
)
#: Move data about, or make it from constants.
_MOVES = frozenset(
    "Compress Concat Constant ConstantOfShape Expand EyeLike Flatten Gather GatherElements GatherND Pad Range Reshape "
    "ScatterElements ScatterND Shape Size Slice Split Squeeze Tile Transpose Trilu Unsqueeze".split()
)
_LOOPS = frozenset({"Loop", "Scan"})


def not_analytic(view: GraphView, candidate: Candidate, extract: Extract) -> str | None:
    """The first node that keeps the region from being analytic, in words; None when there is none."""
    for node in extract.nodes:
        found = _node(view, node)
        if found is not None and not _holds_decays(view, candidate, node):
            return found
    return None


def _node(view: GraphView, node: ir.Node) -> str | None:
    kind = node.op_type
    if all(view.is_const(v) for v in node.outputs):
        return None
    if kind in _LOOPS:
        for graph in subgraphs_of(node):
            for inner in graph:
                found = _inner(view, inner)
                if found is not None:
                    return found
        return None
    if subgraphs_of(node):
        return f"{kind} {node.name!r} chooses between computations"
    if _from_index(node) or _picks_constants(view, node):
        return f"{kind} {node.name!r} turns positions or lengths into values"
    if kind in _MOVES or _plain(view, node):
        return None
    if not _reads_floats(node):
        return None  # arithmetic of shapes and indices
    if _is_mask(view, node) or _explained(view, node):
        return None
    return _words(node)


def _inner(view: GraphView, node: ir.Node) -> str | None:
    """A node of a loop's body: constants of the body are not told from its values, so only plain ops pass."""
    if subgraphs_of(node):
        return _words(node)
    if _from_index(node):
        return f"{node.op_type} {node.name!r} turns positions or lengths into values"
    if node.op_type in _MOVES or _plain(view, node) or not _reads_floats(node):
        return None
    return _words(node)


def _plain(view: GraphView, node: ir.Node) -> bool:
    """Analytic wherever its input can get to. A root or a logarithm is not where its argument reaches 0."""
    kind = node.op_type
    if kind not in _ANALYTIC or _to_integer(node):
        return False
    if kind == "Sqrt":
        return _positive(view, node.inputs[0])
    if kind == "Pow":
        exponent = view.scalar(node.inputs[1])
        if exponent is None:
            return False
        return (exponent >= 0 and exponent == int(exponent)) or _positive(view, node.inputs[0])
    if kind == "ReduceL2":
        return _in_norm(view, node)
    if kind == "Log":
        return match_softplus(view, node) is not None
    return True


def _positive(view: GraphView, value: ir.Value | None) -> bool:
    """A sum of squares and a positive constant; or the bare sum of squares of a norm with a floor."""
    found = radicand(view, value)
    if found is None or value is None:
        return False
    if found.epsilon > 0:
        return True
    return any(is_op(u, "Sqrt") and _in_norm(view, u) for u in view.users(value))


def _in_norm(view: GraphView, node: ir.Node) -> bool:
    """Is the node's result part of the length that a norm with a floor divides by?"""
    level = [node]
    for _ in range(6):
        level = [u for n in level for v in n.outputs for u in view.users(v)]
        if any((norm := match_norm(view, u)) is not None and norm.kind == "max" for u in level):
            return True
    return False


def _picks_constants(view: GraphView, node: ir.Node) -> bool:
    """Entries of a constant that are chosen by something computed: a table that is cut to the length, say."""
    if node.op_type not in ("Slice", "Gather", "GatherElements", "GatherND", "Split", "Compress", "Pad"):
        return False
    data = node.inputs[0]
    if data is None or not view.is_const(data) or all(v is None or view.is_const(v) for v in node.inputs[1:]):
        return False
    array = view.array(data)
    return array is None or (array.dtype.kind not in "iub" and not bool(np.all(array == array.flat[0])))


def _words(node: ir.Node) -> str:
    return f"{node.op_type} {node.name!r} may treat inputs differently that no proof draws"


def _reads_floats(node: ir.Node) -> bool:
    return any(v is not None and (v.dtype is None or v.dtype in FLOAT_TYPES) for v in node.inputs)


def _to_integer(node: ir.Node) -> bool:
    """A cast that rounds."""
    if not is_op(node, "Cast"):
        return False
    source = node.inputs[0]
    floats = source is None or source.dtype is None or source.dtype in FLOAT_TYPES
    return floats and ir.DataType(node.attributes["to"].as_int()) not in FLOAT_TYPES


def _holds_decays(view: GraphView, candidate: Candidate, node: ir.Node) -> bool:
    """An upper bound of 0 on an exponent that is made of log decays alone.

    Chunked forms write ``exp(min(G_i - G_j, 0))``. With the gate's formula recognised, log decays are never positive,
    so the sign of each such difference is the same for all inputs: the bound switches nowhere.
    """
    if not is_op(node, "Clip", "Min") or candidate.config.gate_activation == "none":
        return False
    bounds = [view.scalar(v) for v in node.inputs[1:] if v is not None]
    low_free = node.op_type == "Min" or len(node.inputs) < 2 or node.inputs[1] is None
    users = view.users(node.outputs[0])
    if bounds != [0.0] or not low_free or not users or not all(is_op(u, "Exp") for u in users):
        return False
    source = node.inputs[0]
    gate = {p.value for p in candidate.operands["g"].pieces}
    if source is None:
        return False
    borders = backward(view, [source], lambda v: v in gate or view.is_border(v)).borders
    return set(borders) <= gate


def _from_index(node: ir.Node) -> bool:
    """A cast of computed integers to floats: what depends on it depends on positions that no proof may reach."""
    if not is_op(node, "Cast") or ir.DataType(node.attributes["to"].as_int()) not in FLOAT_TYPES:
        return False
    source = node.inputs[0]
    return source is not None and source.dtype is not None and source.dtype not in FLOAT_TYPES


def _is_mask(view: GraphView, node: ir.Node) -> bool:
    """`Where` with a constant condition. One that is made from lengths may switch where no proof looks."""
    return is_op(node, "Where") and node.inputs[0] is not None and view.is_const(node.inputs[0])


def _explained(view: GraphView, node: ir.Node) -> bool:
    """Part of a softplus with its linear branch, or of a norm with its floor."""
    if is_op(node, "Where"):
        return match_softplus(view, node) is not None
    if is_op(node, "Greater", "GreaterOrEqual"):
        users = view.users(node.outputs[0])
        return bool(users) and all(match_softplus(view, u) is not None for u in users if is_op(u, "Where"))
    return is_op(node, "Clip", "Max") and _in_norm(view, node)
