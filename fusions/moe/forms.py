"""The routed part of a block from its end: experts and their weights in the forms that exports take.

Each reading gives the same thing: every expert's projections, and how the choices are weighted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import onnx_ir as ir

from ..graph import attribute_string
from .dense_weights import read_column, read_dense
from .linear import Linear, gathered_weights, read_linear
from .mlp import Mlp, read_mlp
from .reader import Reader
from .router import Router
from .weights import Weighting, is_ids, picks_choices, read_weighting


@dataclass(frozen=True)
class Routed:
    """The routed experts.

    Attributes:
        form: how they are written.
        experts: one for each, in order; or a single one whose weights are a stack.
        weighting: what the router's choices count.
        inputs: values that the experts are applied to, from which tokens are reached by moving data.
        beside: terms of the same sum that are no routed experts.
        zero: how many experts without weights follow: what they are given is among the inputs.
    """

    form: str
    experts: tuple[Mlp, ...]
    weighting: Weighting
    inputs: tuple[ir.Value, ...]
    beside: tuple[ir.Value, ...] = ()
    zero: int = 0


def read_routed(r: Reader, router: Router, value: ir.Value) -> Routed | None:
    """The routed experts' weighted sum that a value is."""
    from .choices import read_added_rows, read_by_choice
    from .grouped import read_grouped
    from .loops import read_loop
    from .pair_loops import read_pair_loop
    from .zero import read_beside_tokens, read_gathered_or_token

    readings = (
        *(read_gathered, read_stacked, read_dense_sum, read_picked, read_grouped, read_pair_loop, read_loop),
        *(read_gathered_or_token, read_beside_tokens, read_by_choice, read_added_rows),
    )
    for reading in readings:
        found = r.attempt(reading, router, value)
        if found is not None:
            return found
    return None


def choices_sum(r: Reader, router: Router, value: ir.Value | None) -> tuple[ir.Value, ir.Value] | None:
    """(one factor, the other) of products that are summed over something: `ReduceSum` of `Mul`, `MatMul`, `Einsum`."""
    base = r.moved(value)
    node = r.node(base, "ReduceSum", "MatMul", "Einsum")
    if node is None:
        return None
    if node.op_type == "ReduceSum":
        axes = r.axes(node)
        product = r.node(r.moved(node.inputs[0]), "Mul")
        if axes is None or len(axes) != 1 or product is None:
            return None
        first, second = product.inputs
    elif len(node.inputs) == 2:
        first, second = node.inputs
    else:
        return None
    return (first, second) if first is not None and second is not None else None


def read_gathered(r: Reader, router: Router, value: ir.Value) -> Routed | None:
    """Weights gathered for each choice: batched matrix products, einsums."""
    three = r.node(r.moved(value), "Einsum")
    if three is not None and len(three.inputs) == 3:
        return _three_gathered(r, router, three)
    found = choices_sum(r, router, value)
    if found is not None:
        for weights, outputs in (found, found[::-1]):
            mlp = r.attempt(read_mlp, outputs)
            if mlp is None or not is_gathered(r, router, mlp) or mlp.factors:
                continue
            weighting = read_weighting(r, router, weights)
            if weighting is not None:
                return Routed("gathered", (mlp,), weighting, inputs_of(mlp))
        return None
    # the weight is a factor before the down projection
    node = r.node(r.moved(value), "ReduceSum")
    mlp = r.attempt(read_mlp, None if node is None else node.inputs[0])
    if mlp is None or not is_gathered(r, router, mlp) or len(mlp.factors) != 1:
        return None
    weighting = read_weighting(r, router, mlp.factors[0])
    return None if weighting is None else Routed("gathered", (mlp,), weighting, inputs_of(mlp))


def _three_gathered(r: Reader, router: Router, node: ir.Node) -> Routed | None:
    """The down projection and the weighted sum in one einsum, such as ``nkf,nkfd,nk->nd``."""
    left, _, result = attribute_string(node, "equation", "").replace(" ", "").partition("->")
    terms = left.split(",")
    for w, h, c in ((0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)):
        letters = terms[w]
        lead, last = letters[:-2], letters[-2:]
        out = [i for i, x in enumerate(last) if x in result and x not in terms[h] + terms[c]]
        into = [i for i, x in enumerate(last) if x in terms[h] and x not in terms[c] + result]
        if len(lead) < 2 or len(out) != 1 or len(into) != 1 or terms[c] != lead or result != lead[:-1] + last[out[0]]:
            continue
        if terms[h] != lead + last[into[0]]:
            continue
        weights = r.attempt(gathered_weights, node.inputs[w])
        hidden = node.inputs[h]
        if weights is None or weights.ids is None or hidden is None:
            continue
        axes = weights.last
        down = Linear(
            hidden, node.outputs[0], weights.seen, weights.expert, axes[out[0]], axes[into[0]], weights.ids, -1
        )
        mlp = read_mlp(r, node.outputs[0], _or(down))
        if mlp is None or mlp.factors or not is_gathered(r, router, mlp):
            continue
        weighting = read_weighting(r, router, node.inputs[c])
        if weighting is not None:
            return Routed("gathered", (mlp,), weighting, inputs_of(mlp))
    return None


def _or(down: Linear) -> Callable[[Reader, ir.Value | None], Linear | None]:
    """Reads a linear layer; this one is known."""
    return lambda r, value: down if value is down.y else read_linear(r, value)


def linears(mlp: Mlp) -> list[Linear]:
    """The expert's projections."""
    return [mlp.down, mlp.gate.linear, *([] if mlp.up is None else [mlp.up.linear])]


def single(mlp: Mlp) -> bool:
    """Has the expert weights of its own, no stack of them?"""
    return all(x.expert is None and x.ids is None for x in linears(mlp))


def is_gathered(r: Reader, router: Router, mlp: Mlp) -> bool:
    """Are all weights of an expert gathered by the router's ids?"""
    return all(
        layer.ids is not None
        and layer.expert is not None
        and is_ids(r, router, layer.ids)
        and (layer.bias is None or (layer.bias.ids is not None and is_ids(r, router, layer.bias.ids)))
        for layer in linears(mlp)
    )


def inputs_of(mlp: Mlp) -> tuple[ir.Value, ...]:
    """What an expert's first projections read."""
    return (mlp.gate.linear.x, *([] if mlp.up is None else [mlp.up.linear.x]))


def read_stacked(r: Reader, router: Router, value: ir.Value) -> Routed | None:
    """All experts on all tokens, their weights stacked."""
    base = r.moved(value)
    node = r.node(base, "Einsum")
    if node is not None and len(node.inputs) == 3:
        return _three(r, router, node)
    found = r.attempt(choices_sum, router, base)
    for weights, outputs in () if found is None else (found, found[::-1]):
        mlp = r.attempt(read_mlp, outputs)
        if mlp is None or not is_stack(mlp) or mlp.factors:
            continue
        weighting = read_dense(r, router, weights)
        if weighting is not None:
            return Routed("stacked", (mlp,), weighting, inputs_of(mlp))
    # the weight is a factor before the down projection
    node = r.node(base, "ReduceSum")
    mlp = r.attempt(read_mlp, None if node is None else node.inputs[0])
    if mlp is None or not is_stack(mlp) or len(mlp.factors) != 1:
        return None
    weighting = read_dense(r, router, mlp.factors[0])
    return None if weighting is None else Routed("stacked", (mlp,), weighting, inputs_of(mlp))


def is_stack(mlp: Mlp) -> bool:
    """Are the weights those of all experts, none gathered?"""
    return all(x.expert is not None and x.ids is None for x in linears(mlp))


def _three(r: Reader, router: Router, node: ir.Node) -> Routed | None:
    """The down projection and the weighted sum in one einsum, such as ``eni,edi,ne->nd``."""
    left, _, result = attribute_string(node, "equation", "").replace(" ", "").partition("->")
    terms = left.split(",")
    for w in range(3):
        for h in range(3):
            if h == w or len(terms) != 3:
                continue
            weights, hidden, dense = w, h, 3 - w - h
            letters = terms[weights]
            out = [c for c in letters if c in result]
            into = [c for c in letters if c in terms[hidden] and c not in terms[dense] and c not in result]
            expert = [c for c in letters if c in terms[hidden] and c in terms[dense]]
            if [len(out), len(into), len(expert), len(letters)] != [1, 1, 1, 3] or expert[0] in result:
                continue
            found = r.attempt(_three_as, router, node, (weights, hidden, dense), (expert[0], out[0], into[0]), letters)
            if found is not None:
                return found
    return None


def _three_as(
    r: Reader,
    router: Router,
    node: ir.Node,
    operands: tuple[int, int, int],
    names: tuple[str, str, str],
    letters: str,
) -> Routed | None:
    from .stored import see

    weights, hidden, dense = (node.inputs[i] for i in operands)
    seen = see(r.view, weights)
    if seen is None or hidden is None:
        return None
    expert, out, into = (letters.index(c) for c in names)
    down = Linear(hidden, node.outputs[0], seen, expert, out, into, None, -1)

    mlp = read_mlp(r, node.outputs[0], _or(down))
    if mlp is None or mlp.factors or not is_stack(mlp):
        return None
    weighting = read_dense(r, router, dense)
    return None if weighting is None else Routed("stacked", (mlp,), weighting, inputs_of(mlp))


def read_dense_sum(r: Reader, router: Router, value: ir.Value) -> Routed | None:
    """A sum over experts, each on all tokens, times its weight; 0 where it was not chosen."""
    found = r.attempt(_stack_sum, router, value)
    if found is not None:
        return found
    terms = r.terms(value)
    if len(terms) < 2:
        return None
    parts = Parts(router)
    beside: list[ir.Value] = []
    for term in terms:
        if r.is_filled(term, 0.0):
            continue
        read = r.attempt(_weighted, router, term)
        if read is not None and not parts.add(r, (read[0],), read[1], read[2], inputs_of(read[1])):
            return None
        if read is None:
            beside.append(term)
    from .zero import read_weighted_token

    # experts without weights are read when it is known what the others are given
    for term in list(beside):
        given = r.attempt(read_weighted_token, router, term, parts)
        if given is not None and parts.add(r, given[0], None, given[1], (given[2],)):
            beside.remove(term)
    return parts.routed(r, "dense", "a sum of {} weighted experts", tuple(beside))


class Parts:
    """Experts as they are found one by one, those without weights too."""

    def __init__(self, router: Router) -> None:
        self.router = router
        self.experts: dict[int, Mlp] = {}
        self.zero: set[int] = set()
        self.weightings: set[Weighting] = set()
        self.inputs: list[ir.Value] = []

    def add(
        self,
        r: Reader,
        numbers: tuple[int, ...],
        mlp: Mlp | None,
        weighting: Weighting,
        inputs: tuple[ir.Value, ...] | list[ir.Value],
    ) -> bool:
        """One expert, or (``mlp`` None) some that give back what they are given. False: one was there before."""
        if any(n in self.experts or n in self.zero for n in numbers):
            return False
        if mlp is None:
            self.zero.update(numbers)
        else:
            self.experts[numbers[0]] = mlp
        self.weightings.add(weighting)
        self.inputs += inputs
        return True

    def reads(self, r: Reader, value: ir.Value) -> bool:
        """Is a value moved from where experts' inputs are moved from?"""
        mine = set(r.trail(value))
        return any(mine & set(r.trail(x)) for x in self.inputs[:1])

    def routed(self, r: Reader, form: str, words: str, beside: tuple[ir.Value, ...]) -> Routed | None:
        """All of them, where the ones without weights are the last ones."""
        own, every = len(self.experts), self.router.experts
        found = sorted(self.experts) == list(range(own)) and self.zero == set(range(own, every)) and own > 0
        if not found or len(self.weightings) != 1 or len(beside) > 1:
            if own:
                with_zero = f" and {len(self.zero)} without weights" if self.zero else ""
                r.refuse(f"{words.format(own)}{with_zero}, where the router has {every}")
            return None
        in_order = tuple(self.experts[i] for i in range(own))
        return Routed(form, in_order, next(iter(self.weightings)), tuple(self.inputs), beside, len(self.zero))


def _weighted(r: Reader, router: Router, value: ir.Value) -> tuple[int, Mlp, Weighting] | None:
    node = r.node(value, "Mul")
    if node is None:  # the weight is a factor before the down projection
        mlp = r.attempt(read_mlp, value)
        if mlp is None or len(mlp.factors) != 1 or not single(mlp):
            return None
        column = r.attempt(read_column, router, mlp.factors[0])
        return None if column is None else (column[0], mlp, column[1])
    for output, weight in (node.inputs, node.inputs[::-1]):
        column = r.attempt(read_column, router, weight)
        if column is None:
            continue
        mlp = r.attempt(read_mlp, output)
        if mlp is None or mlp.factors or any(x.expert is not None or x.ids is not None for x in linears(mlp)):
            continue
        return column[0], mlp, column[1]
    return None


def _stack_sum(r: Reader, router: Router, value: ir.Value) -> Routed | None:
    """Experts' results stacked in order, times dense weights, summed."""
    found = choices_sum(r, router, value)
    if found is None:
        return None
    for stack, weights in (found, found[::-1]):
        experts = r.attempt(_stacked_results, router, stack)
        weighting = None if experts is None else read_dense(r, router, weights)
        if experts is not None and weighting is not None:
            return Routed("dense", experts, weighting, tuple(x for m in experts for x in inputs_of(m)))
    return None


def _stacked_results(r: Reader, router: Router, value: ir.Value | None) -> tuple[Mlp, ...] | None:
    """The experts whose results are stacked in order; a single entry where their weights are a stack."""
    node = r.node(r.moved(value), "Concat")
    if node is None:
        mlp = r.attempt(read_mlp, value)
        return (mlp,) if mlp is not None and is_stack(mlp) and not mlp.factors else None
    experts = [r.attempt(read_mlp, v) for v in node.inputs] if len(node.inputs) == router.experts else []
    known = tuple(m for m in experts if m is not None and not m.factors)
    if len(known) != router.experts or any(x.expert is not None for m in known for x in linears(m)):
        return None
    return known


def read_picked(r: Reader, router: Router, value: ir.Value) -> Routed | None:
    """All experts on all tokens; of their results those of the choices are picked, weighted and summed."""
    found = choices_sum(r, router, value)
    if found is None:
        return None
    for weights, outputs in (found, found[::-1]):
        node = r.node(r.moved(outputs), "GatherElements", "GatherND")
        if node is None or not picks_choices(r, router, node):
            continue
        experts = r.attempt(_stacked_results, router, node.inputs[0])
        weighting = None if experts is None else read_weighting(r, router, weights)
        if experts is not None and weighting is not None:
            return Routed("picked", experts, weighting, tuple(x for m in experts for x in inputs_of(m)))
    return None
