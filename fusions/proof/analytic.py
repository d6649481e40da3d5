"""Is a region made of analytic functions only, and of few kinds of them?

Then it can't tell inputs apart that the proof never draws: two analytic functions that agree on an open set of inputs
agree everywhere. A clamp, a comparison, a branch or a rounding could be invisible on all drawn inputs and matter on
others; so could a steep activation, for all numbers can show. The steps that the recogniser understood (a softplus with
its linear branch, a norm with its floor, a sigmoid) are known in closed form, and the op does the same. Outside of them
a region may hold sums, products, exponentials and moves, which is all that a recurrence needs in any of its forms.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx_ir as ir

from ..candidate import Candidate
from ..graph import FLOAT_TYPES, GraphView, is_op, subgraphs_of
from .extract import Extract

#: Sums, products, exponentials: analytic everywhere.
_ANALYTIC = frozenset(
    "Add Cast CastLike CausalConvWithState Conv CumSum Einsum Exp FusedMatMul Gemm Identity LinearAttention MatMul Mul "
    "Neg ReduceMean ReduceSum ReduceSumSquare Sub Sum".split()
)
#: Move data about, or make it from constants.
_MOVES = frozenset(
    "Concat Constant ConstantOfShape Expand EyeLike Flatten Gather GatherElements GatherND Pad Range Reshape "
    "ScatterElements ScatterND Shape Size Slice Split Squeeze Tile Transpose Trilu Unsqueeze".split()
)
#: Make numbers out of how many ones there are.
_COUNTING = frozenset({"CumSum", "ReduceSum", "ReduceMean", "ReduceSumSquare", "MatMul", "Gemm", "Einsum"})
#: Of integers and truths these may be constant on all lengths that a proof runs, and change behind them.
_UNEVEN = frozenset(
    "Abs And BitShift BitwiseAnd BitwiseOr BitwiseXor Ceil Clip CumSum Div Equal Floor Greater GreaterOrEqual Less "
    "LessOrEqual Max Min Mod NonZero Not Or Pow ReduceMax ReduceMin ReduceProd ReduceSum "
    "Sign TopK Unique Where Xor".split()
)
_LOOPS = frozenset({"Loop", "Scan"})


def not_analytic(view: GraphView, candidate: Candidate, extract: Extract) -> str | None:
    """The first node that keeps the region from being analytic, in words; None when there is none."""
    told = set(extract.inputs)
    for node in extract.nodes:
        if any(v in told for v in view.inputs_of(node)):
            told.update(node.outputs)
        elif (
            node.op_type in _COUNTING
            and node not in candidate.explained
            and not all(view.is_const(v) for v in node.outputs)
        ):
            # what hangs on no operand hangs on lengths
            return f"{node.op_type} {node.name!r} turns positions or lengths into values"
        if node in candidate.explained or all(view.is_const(v) for v in node.outputs):
            continue
        found = _node(view, node)
        if found is not None and not candidate.op.allows(view, candidate, node):
            return found
    return _uneven_size(view, candidate, extract)


def _uneven_size(view: GraphView, candidate: Candidate, extract: Extract) -> str | None:
    """The first node that computes sizes by what the op does not allow, in words."""
    allowed = candidate.op.size_ops
    if allowed is not None:
        for node in _read(view, extract):
            if node.op_type in _UNEVEN - allowed and node not in candidate.explained and _makes_sizes(view, node):
                return f"{node.op_type} {node.name!r} makes sizes or places that may change how values are laid out"
    return None


def _read(view: GraphView, extract: Extract) -> Iterator[ir.Node]:
    """The nodes of whose results more than the shape is read."""
    inside, seen = set(extract.nodes), set[ir.Node]()
    stack = list(extract.outputs)
    while stack:
        node = stack.pop().producer()
        if node is not None and node in inside and node not in seen:
            seen.add(node)
            yield node
            if not is_op(node, "Shape", "Size"):
                stack.extend(view.inputs_of(node))


def _makes_sizes(view: GraphView, node: ir.Node) -> bool:
    """Does it compute integers or truths from others, for more than whether a loop goes on?"""
    given = [v for v in node.inputs if v is not None and not view.is_const(v)]
    if not given or any(v.dtype in FLOAT_TYPES for v in (*given, *node.outputs[:1])):
        return False
    return not all(user.op_type in _LOOPS for value in node.outputs for user in view.users(value))


def _node(view: GraphView, node: ir.Node) -> str | None:
    kind = node.op_type
    if kind in _LOOPS:
        for graph in subgraphs_of(node):
            for inner in graph:
                found = _node(view, inner)
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
    if _is_mask(view, node):
        return None
    return f"{kind} {node.name!r} may treat inputs differently that no proof draws"


def _plain(view: GraphView, node: ir.Node) -> bool:
    """Analytic for all inputs."""
    if node.op_type == "Pow":
        exponent = view.scalar(node.inputs[1])
        return exponent is not None and exponent >= 0 and exponent == int(exponent)
    if node.op_type == "Div":
        below = node.inputs[1]
        return below is not None and (view.is_const(below) or _inner_constant(below))
    return node.op_type in _ANALYTIC and not _to_integer(node)


def _inner_constant(value: ir.Value) -> bool:
    """A constant of a loop's body."""
    producer = value.producer()
    return (producer is None and value.const_value is not None) or is_op(producer, "Constant")


def _reads_floats(node: ir.Node) -> bool:
    return any(v is not None and (v.dtype is None or v.dtype in FLOAT_TYPES) for v in node.inputs)


def _to_integer(node: ir.Node) -> bool:
    """A cast that rounds."""
    if not is_op(node, "Cast"):
        return False
    source = node.inputs[0]
    floats = source is None or source.dtype is None or source.dtype in FLOAT_TYPES
    return floats and ir.DataType(node.attributes["to"].as_int()) not in FLOAT_TYPES


def _from_index(node: ir.Node) -> bool:
    """A cast of computed integers to floats: what depends on it depends on positions that no proof may reach."""
    if not is_op(node, "Cast") or ir.DataType(node.attributes["to"].as_int()) not in FLOAT_TYPES:
        return False
    source = node.inputs[0]
    return source is not None and source.dtype is not None and source.dtype not in FLOAT_TYPES


def _picks_constants(view: GraphView, node: ir.Node) -> bool:
    """Entries of a constant that are chosen by something computed: a table that is cut to the length, say."""
    if node.op_type not in ("Slice", "Gather", "GatherElements", "GatherND", "Split", "Pad"):
        return False
    data = node.inputs[0]
    if data is None or not view.is_const(data) or all(v is None or view.is_const(v) for v in node.inputs[1:]):
        return False
    array = view.array(data)
    return array is None or (array.dtype.kind not in "iub" and not bool(np.all(array == array.flat[0])))


def _is_mask(view: GraphView, node: ir.Node) -> bool:
    """`Where` with a constant condition. One that is made from lengths may switch where no proof looks."""
    return is_op(node, "Where") and node.inputs[0] is not None and view.is_const(node.inputs[0])
