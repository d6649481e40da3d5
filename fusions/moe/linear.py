"""Linear layers of experts: constant weights, a stack of them, or weights gathered for each choice."""

from __future__ import annotations

from dataclasses import dataclass, replace

import onnx_ir as ir

from ..graph import attribute_float, attribute_int, attribute_ints, attribute_string, is_op, rank_of, static_dims
from .reader import Reader, last_dim
from .stored import HALF, Quantized, Seen, rounded, see


@dataclass(frozen=True)
class Bias:
    """A constant that is added to what a linear layer gives, or a row of it for each choice.

    Attributes:
        given: the value that is added.
        seen: the constant behind it.
        expert, out: its axes of experts (None: one for all) and output channels.
        ids: which expert's row each choice takes; None where it is not gathered.
    """

    given: ir.Value
    seen: Seen
    expert: int | None
    out: int
    ids: ir.Value | None = None


@dataclass(frozen=True)
class Linear:
    """``y = weight x``.

    Attributes:
        x: what it is applied to.
        y: its result.
        seen: the weights.
        expert, out, into: axes of ``seen``: experts (None for one matrix), output channels, input channels.
        ids: which expert's weights each row takes; None where it is not gathered.
        rows: the axis of ``y`` that holds the output channels, from the end.
        bias: what is added.
    """

    x: ir.Value
    y: ir.Value
    seen: Seen
    expert: int | None
    out: int
    into: int
    ids: ir.Value | None
    rows: int
    bias: Bias | None = None

    @property
    def width(self) -> int:
        return self.seen.shape[self.out]

    @property
    def depth(self) -> int:
        return self.seen.shape[self.into]


@dataclass(frozen=True)
class _Weights:
    """Weights as an operand has them: which axes of ``seen`` its last two are, and the experts' axis."""

    seen: Seen
    expert: int | None
    last: tuple[int, int]
    ids: ir.Value | None = None


def read_linear(r: Reader, value: ir.Value | None) -> Linear | None:
    """The linear layer that gives a value, with a bias if one is added."""
    if value is None or r.view.is_const(value):
        return None
    node = r.node(value, "Add")
    if node is None:
        return _bare(r, value)
    for one, other in ((0, 1), (1, 0)):
        found = r.attempt(_biased, value, node.inputs[one], node.inputs[other])
        if found is not None:
            return found
    return None


def _biased(r: Reader, y: ir.Value, base: ir.Value | None, bias: ir.Value | None) -> Linear | None:
    """The layer that gives ``base``, moved at most, with a bias."""
    if base is None or bias is None:
        return None
    inner, rows = _bare(r, base), -1
    if inner is None:
        inner = _bare(r, r.moved(base))
        if inner is None or inner.width != last_dim(base):
            return None
    else:
        rows = inner.rows
    if inner.bias is not None:
        return None
    found = read_bias(r, inner, bias, rows)
    return None if found is None else replace(inner, bias=found, y=y, rows=rows)


def read_bias(r: Reader, layer: Linear, value: ir.Value, rows: int = -1) -> Bias | None:
    """What a value is that is added to a layer's result, of which the axis ``rows`` from the end holds the channels."""
    if r.view.is_const(value):
        seen = see(r.view, value)
        if seen is None or len(seen.axes) < -rows:
            return None
        long = [i for i, size in enumerate(seen.shape) if size != 1 or i == len(seen.axes) + rows]
        if layer.expert is None or layer.ids is not None:
            wanted = [layer.width]
        else:
            wanted = [layer.seen.shape[layer.expert], layer.width]
        if [seen.shape[i] for i in long] != wanted or long[-1] != len(seen.axes) + rows:
            return None
        return Bias(value, seen, long[0] if len(long) == 2 else None, long[-1])
    gather = r.node(r.moved(value), "Gather", "GatherND")
    if gather is None or rows != -1 or layer.expert is None:
        return None
    if value.dtype not in HALF and any(v.dtype in HALF and gather.outputs[0].dtype != v.dtype for v in r.trail(value)):
        return None  # rounded on its way
    seen, index = see(r.view, gather.inputs[0]), gather.inputs[1]
    if seen is None or index is None or seen.shape != (layer.seen.shape[layer.expert], layer.width):
        return None
    dims = static_dims(index)
    if gather.op_type == "Gather" and attribute_int(gather, "axis", 0) % 2 != 0:
        return None
    if gather.op_type == "GatherND" and (attribute_int(gather, "batch_dims", 0) or dims is None or dims[-1] != 1):
        return None
    return Bias(value, seen, 0, 1, index)


def _bare(r: Reader, value: ir.Value | None) -> Linear | None:
    node = r.node(value, "MatMul", "Gemm", "Einsum")
    if node is None or value is None:
        return None
    if node.op_type == "Gemm":
        return _gemm(r, node, value)
    if node.op_type == "Einsum":
        return _einsum(r, node, value)
    left, right = node.inputs
    assert left is not None
    assert right is not None
    weights = r.attempt(_weights, right)
    if weights is not None:
        return Linear(left, value, weights.seen, weights.expert, weights.last[1], weights.last[0], weights.ids, -1)
    weights = r.attempt(_weights, left)
    if weights is not None:
        return Linear(right, value, weights.seen, weights.expert, weights.last[0], weights.last[1], weights.ids, -2)
    return None


def read_gemm(r: Reader, node: ir.Node, value: ir.Value) -> Linear | None:
    """The linear layer of a `Gemm`, or of ORT's `FusedGemm` before its activation."""
    return r.attempt(_gemm, node, value)


def _gemm(r: Reader, node: ir.Node, value: ir.Value) -> Linear | None:
    weights = r.attempt(_weights, node.inputs[1])
    if weights is None or attribute_float(node, "alpha", 1.0) != 1.0 or attribute_int(node, "transA", 0):
        return None
    first, second = weights.last
    into, out = (second, first) if attribute_int(node, "transB", 0) else (first, second)
    bias = node.inputs[2] if len(node.inputs) > 2 else None
    if bias is not None and (attribute_float(node, "beta", 1.0) != 1.0 or not r.view.is_const(bias)):
        return None
    assert node.inputs[0] is not None
    found = Linear(node.inputs[0], value, weights.seen, weights.expert, out, into, weights.ids, -1)
    if bias is None:
        return found
    added = read_bias(r, found, bias)
    return None if added is None else replace(found, bias=added)


def _einsum(r: Reader, node: ir.Node, value: ir.Value) -> Linear | None:
    """Two operands: one contracted letter, one letter of the weights that the result has too and x has not."""
    if len(node.inputs) != 2:
        return None
    left, _, result = attribute_string(node, "equation", "").replace(" ", "").partition("->")
    terms = left.split(",")
    if len(terms) != 2 or not result or "." in left:
        return None
    for x, w in ((0, 1), (1, 0)):
        weights = r.attempt(_weights_any, node.inputs[w])
        if weights is None or node.inputs[x] is None:
            continue
        letters = terms[w][len(terms[w]) - len(weights.seen.axes) :] if weights.ids is None else "?" + terms[w][-2:]
        if len(letters) != len(weights.seen.axes):
            continue
        into = [i for i, c in enumerate(letters) if c in terms[x] and c not in result]
        out = [i for i, c in enumerate(letters) if c in result and c not in terms[x]]
        rest = [i for i, c in enumerate(letters) if i not in (*into, *out)]
        if weights.ids is None and len(out) == 2 and len(letters) == 3:
            # "nd,eid->eni": experts are an output axis too; the first of the two is theirs
            rest, out = [out[0]], [out[1]]
        if len(into) != 1 or len(out) != 1 or len(rest) != len(letters) - 2:
            continue
        order = [weights.expert, *weights.last] if weights.ids is not None else list(range(len(letters)))
        axes = [order[i] for i in (into[0], out[0])]
        expert = weights.expert if weights.ids is not None else (rest[0] if rest else None)
        assert axes[0] is not None
        assert axes[1] is not None
        rows = result.index(letters[out[0]]) - len(result)
        x_value = node.inputs[x]
        assert x_value is not None
        return Linear(x_value, value, weights.seen, expert, axes[1], axes[0], weights.ids, rows)
    return None


def gathered_weights(r: Reader, value: ir.Value | None) -> _Weights | None:
    """Weights of a stack that an index takes for each choice; last their channels."""
    found = _weights(r, value)
    return None if found is None or found.ids is None else found


def _weights_any(r: Reader, value: ir.Value | None) -> _Weights | None:
    return _weights(r, value)


def _weights(r: Reader, value: ir.Value | None) -> _Weights | None:
    """Constant or gathered weights."""
    if value is None:
        return None
    if r.view.is_const(value):
        seen = see(r.view, value)
        if seen is None or len(seen.axes) not in (2, 3):
            return None
        return _Weights(seen, 0 if len(seen.axes) == 3 else None, (len(seen.axes) - 2, len(seen.axes) - 1))
    return _gathered(r, value)


def _gathered(r: Reader, value: ir.Value) -> _Weights | None:
    node = r.node(
        value, "Gather", "GatherND", "Transpose", "Reshape", "Unsqueeze", "Squeeze", "Cast", "DequantizeLinear"
    )
    if node is None or node.inputs[0] is None:
        return None
    source = node.inputs[0]
    if node.op_type in ("Gather", "GatherND"):
        return _gather(r, node)
    if node.op_type == "DequantizeLinear":
        return _dequantized(r, node)
    inner = _gathered(r, source)
    if inner is None or (node.op_type == "Cast" and rounded(inner.seen, source, value)):
        return None
    if node.op_type == "Transpose":
        order = attribute_ints(node, "perm")
        rank = rank_of(source)
        if order is None or rank is None:
            return None
        lead = list(range(rank - 2))
        if order == [*lead, rank - 1, rank - 2]:
            return replace(inner, last=(inner.last[1], inner.last[0]))
        return inner if order == list(range(rank)) else None
    before, after = static_dims(source), static_dims(value)
    if before is None or after is None or before[-2:] != after[-2:] or None in before[-2:]:
        return None
    return inner


def _gather(r: Reader, node: ir.Node) -> _Weights | None:
    data, index = node.inputs[0], node.inputs[1]
    seen = see(r.view, data)
    if seen is None or len(seen.axes) != 3 or index is None:
        return None
    if node.op_type == "Gather":
        if attribute_int(node, "axis", 0) % 3 != 0:
            return None
    else:
        dims = static_dims(index)
        if attribute_int(node, "batch_dims", 0) != 0 or dims is None or dims[-1] != 1:
            return None
    return _Weights(seen, 0, (1, 2), index)


def _dequantized(r: Reader, node: ir.Node) -> _Weights | None:
    """Stored numbers, scales and zero points gathered alike, then dequantized."""
    found = [_gathered(r, v) for v in node.inputs if v is not None]
    first = found[0] if found else None
    if first is None or any(f is None or f.ids is None or f.last != (1, 2) for f in found) or node.inputs[0] is None:
        return None
    if any(len(f.seen.parts) != 1 or f.seen.parts[0].picks or f.seen.axes != (0, 1, 2) for f in found if f is not None):
        return None
    ids = first.ids
    if ids is None or any(f is not None and (f.ids is None or not _same_ids(r, f.ids, ids)) for f in found):
        return None
    rank = rank_of(node.inputs[0])
    if rank is None:
        return None
    axis = attribute_int(node, "axis", 1) % rank - rank + 3  # of the stored tensor
    block = attribute_int(node, "block_size", 0)
    if axis not in (1, 2) or not block:
        return None
    values = [f.seen.parts[0].source for f in found if f is not None]
    quantized = Quantized(values[1], values[2] if len(values) > 2 else None, axis, block)
    part = replace(first.seen.parts[0], quantized=quantized)
    return replace(first, seen=replace(first.seen, parts=(part,)))


def _same_ids(r: Reader, a: ir.Value, b: ir.Value) -> bool:
    return r.moved(a) is r.moved(b)


def is_weight_gather(view_const: bool, node: ir.Node | None) -> bool:
    """Does a node take constant rank-3 weights by computed indices?"""
    return view_const and is_op(node, "Gather", "GatherND") and node is not None and rank_of(node.inputs[0]) == 3  # type: ignore[arg-type]
