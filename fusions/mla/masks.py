"""What a mask says: causal, sliding, padding, in closed form; or an operand."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from ..graph import FLOAT_TYPES, GraphView, is_op
from .elements import Choice, Element, Unknown, truth
from .linear import Cond, Lin, Look, axis, both, negate
from .symbolic import Symbolic

#: Added to a score, this or less leaves nothing of its key: beyond what scores of 16 bits reach, or any in float32. A
#: mask of -10000 does not: scores may be as large as that.
_NOTHING = {ir.DataType.FLOAT16: -6e4}
_NOTHING_WIDE = -1e8


def nothing(dtype: ir.DataType | None) -> float:
    """The largest mask of this type that leaves nothing of a key."""
    return _NOTHING_WIDE if dtype is None else _NOTHING.get(dtype, _NOTHING_WIDE)


@dataclass(frozen=True)
class MaskTerm:
    """One mask in the graph. kind: "add" added to the scores, "keep" truths of the keys that count."""

    kind: str
    value: ir.Value


@dataclass
class Mask:
    """What all masks of a block say together.

    Attributes:
        causal, window: in closed form; ``window`` 0 for none.
        operand: a tensor that the op takes as mask, or None; ``keys_only``: it is [batch, keys].
        is_bool: the operand holds truths.
        nodes: what was explained.
        notes: for the report.
    """

    causal: int = 0
    window: int = 0
    operand: ir.Value | None = None
    keys_only: bool = False
    is_bool: bool = False
    nodes: set[ir.Node] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Places:
    """Where queries stand: ``offset``, the first one's place among the keys; ``tokens``, how many there are;
    ``axis``, theirs in the scores, counted from the last."""

    offset: Lin
    tokens: Lin
    axis: int = 2


class _NoClosedForm(Exception):
    pass


def read_masks(
    view: GraphView,
    symbolic: Symbolic,
    terms: list[MaskTerm],
    causal: bool,
    where: Places,
) -> list[Mask]:
    """Readings of a block's masks, likeliest first.

    Args:
        causal: the attention is causal by itself (an attribute).
    """
    found: list[Mask] = []
    try:
        found.append(_closed(view, symbolic, terms, causal, where))
    except _NoClosedForm:
        pass
    if not terms:
        return found
    mixed = _mixed(view, symbolic, terms, causal, where)
    if mixed is not None and not found:
        found.append(mixed)
    if len(terms) == 1:
        term = terms[0]
        kept = as_truths(view, term)
        if kept is not None:
            value, nodes = kept
            found.append(Mask(int(causal), 0, value, False, True, nodes, ["the mask stays an operand"]))
        if term.value.dtype == ir.DataType.BOOL or term.value.dtype is None or term.value.dtype in FLOAT_TYPES:
            is_bool = term.value.dtype == ir.DataType.BOOL
            found.append(Mask(int(causal), 0, term.value, False, is_bool, set(), ["the mask stays an operand"]))
    return found


def _mixed(view: GraphView, symbolic: Symbolic, terms: list[MaskTerm], causal: bool, where: Places) -> Mask | None:
    """Masks of several parts, all but one in closed form: that one, padding as a rule, stays a small operand."""
    parts: list[MaskTerm] = []
    nodes: set[ir.Node] = set()
    for term in terms:
        parts += _parts(view, term, nodes)
    if len(parts) < 2:
        return None
    known: list[MaskTerm] = []
    rest: list[MaskTerm] = []
    for part in parts:
        try:
            closed = _closed(view, symbolic, [part], True, where)  # causal: a window alone is none
        except _NoClosedForm:
            closed = None
        (rest if closed is None or closed.operand is not None else known).append(part)
    if len(rest) != 1 or not known or len(rest[0].value.shape or ()) != 4:
        return None
    try:
        made = _closed(view, symbolic, known, causal, where)
    except _NoClosedForm:
        return None
    operand = rest[0]
    made.operand, made.is_bool = operand.value, operand.value.dtype == ir.DataType.BOOL
    if operand.kind == "keep" and not made.is_bool:
        return None
    made.nodes |= nodes
    made.notes = ["a part of the mask stays an operand"]
    return made


def _parts(view: GraphView, term: MaskTerm, nodes: set[ir.Node]) -> list[MaskTerm]:
    """Masks that a mask is put together from: sums, and truths that must all hold."""
    producer = term.value.producer()
    if producer is None or view.is_const(term.value):
        return [term]
    if is_op(producer, "Expand", "Identity") and (source := producer.inputs[0]) is not None:
        if len(source.shape or ()) == len(term.value.shape or ()):
            found: set[ir.Node] = set()
            parts = _parts(view, MaskTerm(term.kind, source), found)
            if len(parts) > 1:
                nodes |= {producer, *found}
                return parts
        return [term]
    pair = [v for v in producer.inputs if v is not None]
    if is_op(producer, "Add" if term.kind == "add" else "And") and len(pair) == 2:
        nodes.add(producer)
        return [p for v in pair for p in _parts(view, MaskTerm(term.kind, v), nodes)]
    truths = as_truths(view, term)
    if truths is not None:
        inner: set[ir.Node] = set()
        parts = _parts(view, MaskTerm("keep", truths[0]), inner)
        if len(parts) > 1:
            nodes |= truths[1] | inner
            return parts
    return [term]


def as_truths(view: GraphView, term: MaskTerm) -> tuple[ir.Value, set[ir.Node]] | None:
    """The truths that an added mask is made from: `Where(keep, 0, least)`, `(not keep) * least`."""
    if term.kind != "add":
        return None
    nodes: set[ir.Node] = set()
    value, inverted, limit = term.value, False, nothing(term.value.dtype)
    for _ in range(12):
        producer = value.producer()
        if producer is None:
            return None
        nodes.add(producer)
        if is_op(producer, "Where"):
            yes, no = view.scalar(producer.inputs[1]), view.scalar(producer.inputs[2])
            if yes == 0.0 and no is not None and no <= limit and not inverted:
                return (producer.inputs[0], nodes) if producer.inputs[0] is not None else None
            return None
        if is_op(producer, "Mul"):
            least = view.scalar(producer.inputs[1])
            source = producer.inputs[0]
            if least is None:
                least, source = view.scalar(producer.inputs[0]), producer.inputs[1]
            if least is None or least > limit or source is None:
                return None
            value, inverted = source, True
        elif is_op(producer, "Cast", "Identity") and producer.inputs[0] is not None:
            value = producer.inputs[0]
            if value.dtype == ir.DataType.BOOL and inverted:
                deny = value.producer()
                if is_op(deny, "Not") and deny is not None and deny.inputs[0] is not None:
                    nodes.add(deny)
                    return deny.inputs[0], nodes
                return None
        elif is_op(producer, "Sub") and inverted and view.scalar(producer.inputs[0]) == 1.0:
            cast = producer.inputs[1]
            inner = None if cast is None else cast.producer()
            if is_op(inner, "Cast") and inner is not None and inner.inputs[0] is not None:
                if inner.inputs[0].dtype == ir.DataType.BOOL:
                    nodes.add(inner)
                    return inner.inputs[0], nodes
            return None
        else:
            return None
    return None


def keeps(element: Element, limit: float) -> Cond:
    """Where an added mask is zero; elsewhere it must be ``limit`` or less, which leaves nothing."""
    if isinstance(element, Choice):
        yes, no = keeps(element.yes, limit), keeps(element.no, limit)
        return both(
            negate(both(element.cond, negate(yes))),
            negate(both(negate(element.cond), negate(no))),
        )
    number = element.number if isinstance(element, Lin) else element if isinstance(element, float) else None
    if number is None or not (number == 0 or number <= limit):
        raise _NoClosedForm
    return Cond("true") if number == 0 else Cond("false")


def _conditions(cond: Cond) -> list[Cond]:
    return list(cond.parts) if cond.kind == "and" else [] if cond.kind == "true" else [cond]


def _closed(view: GraphView, symbolic: Symbolic, terms: list[MaskTerm], causal: bool, where: Places) -> Mask:
    found = Mask(int(causal))
    looked: dict[tuple[ir.Value, bool], None] = {}
    for term in terms:
        constant = _frozen(view, term, where)
        if constant is not None:
            _merge(found, *constant)
            continue
        try:
            tensor = symbolic(term.value)
        except Unknown:
            raise _NoClosedForm from None
        try:
            cond = keeps(tensor.element, nothing(term.value.dtype)) if term.kind == "add" else truth(tensor.element)
        except Unknown:
            raise _NoClosedForm from None
        found.nodes |= symbolic.nodes_of(term.value)
        for part in _conditions(cond):
            _condition(view, found, part, where, looked)
    if len(looked) > 1:
        raise _NoClosedForm
    if looked:
        value, is_bool = next(iter(looked))
        found.operand, found.keys_only, found.is_bool = value, True, is_bool
    if found.window and not found.causal:
        raise _NoClosedForm
    return found


def _merge(found: Mask, causal: int, window: int) -> None:
    found.causal |= causal
    if window:
        found.window = window if not found.window else min(window, found.window)


def _truths(view: GraphView, value: ir.Value) -> ir.Value | None:
    """The value, or what the graph makes of it, as truths."""
    if value.dtype == ir.DataType.BOOL:
        return value
    for user in view.users(value):
        if is_op(user, "Cast") and user.outputs[0].dtype == ir.DataType.BOOL:
            return user.outputs[0]
    return None


def _condition(
    view: GraphView,
    found: Mask,
    cond: Cond,
    where: Places,
    looked: dict[tuple[ir.Value, bool], None],
) -> None:
    """One condition that a key must meet."""
    one = where.tokens.number == 1
    query, key = (Lin(0) if one else axis(where.axis)) + where.offset, axis(1)
    if cond.kind == "le":
        ahead = (cond.lin - (key - query)).number
        behind = (cond.lin - (query - key)).number
        if ahead == 0:  # key - query <= 0
            found.causal = 1
            return
        if behind is not None and behind <= 0:  # query - key <= -behind
            _merge(found, 0, 1 - behind)
            return
        if ahead is not None and ahead < 0 and not one:
            raise _NoClosedForm  # it sees ahead
    inner = cond.parts[0] if cond.kind == "not" else None
    if inner is not None and inner.kind == "eq" and len(inner.lin.terms) == 1 and inner.lin.const == 0:
        look, _ = inner.lin.terms[0]
        if isinstance(look, Look) and len(look.index) == 2 and look.index[1] == key:
            batch = look.index[0]
            truths = _truths(view, look.value)
            if batch in (Lin(0), axis(4)) and truths is not None:
                looked[(truths, True)] = None
                return
    raise _NoClosedForm


def _frozen(view: GraphView, term: MaskTerm, where: Places) -> tuple[int, int] | None:
    """(causal, window) of a constant mask [..., tokens, keys] of a frozen graph."""
    offset, tokens = where.offset.number, where.tokens.number
    if not view.is_const(term.value) or offset is None or tokens is None:
        return None
    array = view.array(term.value)
    if array is None or array.ndim < where.axis:
        return None
    array = np.moveaxis(array, -where.axis, -2)
    tables: np.ndarray = array.reshape(-1, array.shape[-2], array.shape[-1])
    if not bool(np.all(tables == tables[:1])):
        return None
    table: np.ndarray = tables[0]
    if table.dtype.kind != "b":
        table = table.astype(np.float32)
        if not np.all((table == 0) | (table <= nothing(term.value.dtype))):
            return None
        table = table == 0
    rows, keys = table.shape[0], table.shape[1]
    if rows not in (1, tokens) or (rows == 1 and tokens != 1):
        return (0, 0) if bool(np.all(table)) else None
    place = offset + np.arange(rows)[:, None]
    at = np.arange(keys)[None, :]
    if bool(np.all(table)):
        return 0, 0
    if np.array_equal(table, at <= place):
        return 1, 0
    window = int(table.sum(axis=-1).max())
    if np.array_equal(table, (at <= place) & (at > place - window)):
        return 1, window
    return None
