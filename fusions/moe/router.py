"""The router, from its last `TopK` back: choice, groups that stay, bias, scores, logits."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from ..graph import attribute_int, attribute_string, is_op, static_dims
from .groups import Groups, read_masked
from .linear import Linear, read_gemm, read_linear
from .reader import MOVES, Reader, last_dim

#: Logits that are chosen from, at most: more of them are words.
MOST = 4096
#: Biases of choices below this leave no digit in a sum with ``groups.DROWNED``.
SMALL = 16.0


@dataclass(frozen=True)
class Router:
    """What the last `TopK` chooses from.

    Attributes:
        ids, values: results of the `TopK`.
        scores: unbiased scores, before any mask.
        logits: the scores' input, None where one node gives the scores; ``linear`` the layer that gives them, None
            where it is no linear layer with weights.
        narrowing: a cast to 16 bits between scores and choice.
        bound: while experts are read of which those from this number on have no weights: that number.
        by_logits: logits are chosen from, and scores made of the chosen ones; ``scores`` are the logits then.
    """

    topk: ir.Node
    experts: int
    top_k: int
    ids: ir.Value
    values: ir.Value
    choice: ir.Value
    scores: ir.Value
    function: str
    bias: ir.Value | None
    groups: Groups | None
    logits: ir.Value | None
    linear: Linear | None
    narrowing: ir.Node | None
    by_logits: bool = False
    bound: int | None = None

    @property
    def values_are_scores(self) -> bool:
        """Are the chosen choices scores (those of groups that did not stay 0)?"""
        return not self.by_logits and self.bias is None and (self.groups is None or self.groups.fill == "0")


def read_router(r: Reader, topk: ir.Node) -> Router | None:
    """The router that ends in a `TopK`, or None (silently: most `TopK` nodes are none)."""
    if not is_op(topk, "TopK") or attribute_int(topk, "largest", 1) != 1 or len(topk.inputs) != 2:
        return None
    count, choice = r.scalar(topk.inputs[1]), topk.inputs[0]
    experts = last_dim(choice)
    if count is None or choice is None or experts is None:
        return None
    rank = len(choice.shape) if choice.shape is not None else 0
    if attribute_int(topk, "axis", -1) % rank != rank - 1:
        return None
    r.marks.add(topk)
    by_logits = r.attempt(_by_logits, topk, experts, int(count))
    if by_logits is not None:
        return by_logits
    groups: Groups | None = None
    inner: ir.Value | None = choice
    masked = r.attempt(read_masked, choice)
    if masked is not None:
        inner, groups = masked
    bias: ir.Value | None = None
    base = r.moved(inner)
    add = r.node(base, "Add")
    if add is not None:
        bias = next((v for v in add.inputs if v is not None and r.view.is_const(v)), None)
        other = [v for v in add.inputs if v is not bias]
        if bias is None or len(other) != 1 or _size(bias) != experts:
            return None
        base = r.moved(other[0])
    if base is None or last_dim(base) != experts:
        return None
    fused = r.attempt(_fused_sigmoid, base)
    if fused is not None:
        narrowing = r.marks.narrowing()
        ids, values = topk.outputs[1], topk.outputs[0]
        return Router(
            topk, experts, int(count), ids, values, choice, base, "sigmoid", bias, groups, None, fused, narrowing
        )
    producer = r.node(base, "Sigmoid", "Softmax")
    if producer is None:
        return None
    if producer.op_type == "Softmax" and attribute_int(producer, "axis", -1) not in (-1, len(base.shape or ()) - 1):
        return None
    logits = producer.inputs[0]
    if logits is None:
        return None
    narrowing = r.marks.narrowing()
    linear = r.attempt(_logits, logits, experts)
    ids, values = topk.outputs[1], topk.outputs[0]
    return Router(
        topk,
        experts,
        int(count),
        ids,
        values,
        choice,
        base,
        producer.op_type.lower(),
        bias,
        groups,
        logits,
        linear,
        narrowing,
    )


def _by_logits(r: Reader, topk: ir.Node, experts: int, count: int) -> Router | None:
    """A router that chooses the largest logits, whose softmax or sigmoid is taken afterwards."""
    choice, (values, ids) = topk.inputs[0], topk.outputs
    if choice is None or count >= experts or experts > MOST:
        return None
    function = _function_after(r, values)
    if function is not None:  # of the chosen ones themselves, so nothing was added for choosing only
        return r.attempt(_of_these, topk, (experts, count), choice, None, function)
    logits, bias = choice, None
    add = r.node(r.moved(choice), "Add")
    if add is not None:
        found = [v for v in add.inputs if v is not None and r.view.is_const(v) and _size(v) == experts]
        rest = [v for v in add.inputs if v is not None and v not in found]
        if len(found) == 1 and len(rest) == 1 and _function_of_chosen(r, rest[0], ids) is not None:
            logits, bias = rest[0], found[0]
    function = _function_of_chosen(r, logits, ids)
    return None if function is None else r.attempt(_of_these, topk, (experts, count), logits, bias, function)


def _of_these(
    r: Reader, topk: ir.Node, sizes: tuple[int, int], logits: ir.Value, bias: ir.Value | None, function: str
) -> Router | None:
    (experts, count), (values, ids), choice = sizes, topk.outputs, topk.inputs[0]
    linear = r.attempt(_logits, logits, experts)
    if linear is None or choice is None:
        return None
    narrowing = r.marks.narrowing() if bias is not None else None
    return Router(
        topk,
        experts,
        count,
        ids,
        values,
        choice,
        logits,
        function,
        bias,
        None,
        logits,
        linear,
        narrowing,
        by_logits=True,
    )


def _function_after(r: Reader, value: ir.Value) -> str | None:
    """What a value goes through first: "softmax" or "sigmoid"."""
    waiting = [value]
    while waiting:
        current = waiting.pop()
        for user in r.view.users(current):
            if is_op(user, "Softmax", "Sigmoid"):
                return user.op_type.lower()
            spread = is_op(user, "ScatterElements") and user.inputs[2] is current
            if is_op(user, *MOVES) or spread:
                waiting.append(user.outputs[0])
    return None


def _function_of_chosen(r: Reader, logits: ir.Value, ids: ir.Value) -> str | None:
    """What logits go through that are gathered at ids: before or after they are."""
    of_all = _function_after(r, logits)
    waiting = [ids]
    while waiting:
        for user in r.view.users(waiting.pop()):
            if is_op(user, "GatherElements") and user.inputs[0] is not None:
                trail = r.trail(user.inputs[0])
                if any(v in r.trail(logits) for v in trail):
                    return _function_after(r, user.outputs[0])
                scores = trail[-1].producer()
                if is_op(scores, "Softmax", "Sigmoid") and scores is not None and scores.inputs[0] is not None:
                    if logits in r.trail(scores.inputs[0]):
                        return of_all
            if is_op(user, *MOVES):
                waiting.append(user.outputs[0])
    return None


def low_bias(r: Reader, router: Router) -> str | None:
    """In words, that a bias makes choices as low as those of groups that do not stay, where these are a finite number;
    None where it does not. The op has minus infinity for them. Scores are 0 or more, so the bias alone says it."""
    groups, bias = router.groups, None if router.bias is None else r.view.array(router.bias)
    if groups is None or bias is None or groups.fill != "-inf" or not math.isfinite(groups.least):
        return None
    lowest = float(np.min(bias.astype(np.float64)))
    if groups.added and not float(np.max(np.abs(bias.astype(np.float64)))) < SMALL:
        return f"a bias of {SMALL:g} or more shows beside {groups.least:g}, which is added for groups that do not stay"
    if lowest > groups.least:
        return None
    return f"a bias of {lowest:g} puts choices below {groups.least:g}, which those of groups that do not stay become"


def other_scores(router: Router) -> str | None:
    """Which of the router's numbers has 16 bits or 64; None where all that decide are float32.

    Sigmoids of large logits are equal in float32 and not in float64. A softmax's scores have no such bound.
    """
    half = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
    if router.by_logits and router.bias is None:
        return None  # 16-bit logits are an operand of the op as they are, and are chosen from in the same order
    saturates = router.function == "sigmoid" and not router.by_logits
    for what, value in (("scores", router.scores), ("choices", router.choice)):
        finer = router.bias is not None or router.groups is not None or (what == "scores" and saturates)
        if value.dtype in half or (value.dtype == ir.DataType.DOUBLE and finer):
            return f"the {what} {value.name!r} are {str(value.dtype).lower()}"
    if router.narrowing is not None:
        return f"{router.narrowing.name!r} rounds scores or choices to 16 bits"
    return None


def _size(value: ir.Value) -> int | None:
    dims = static_dims(value)
    return None if dims is None or None in dims else int(np.prod(dims))  # type: ignore[arg-type]


def _fused_sigmoid(r: Reader, value: ir.Value) -> Linear | None:
    """The router's layer where ORT's optimiser has put the sigmoid into it."""
    node = value.producer()
    if node is None or node.domain != "com.microsoft" or node.op_type != "FusedGemm":
        return None
    if attribute_string(node, "activation", "") != "Sigmoid":
        return None
    r.marks.add(node)
    found = read_gemm(r, node, value)
    return None if found is None or found.expert is not None else found


def _logits(r: Reader, value: ir.Value, experts: int) -> Linear | None:
    base = r.moved(value)
    found = read_linear(r, base)
    if found is None or found.width != experts or found.expert is not None or found.rows != -1:
        return None
    return found
