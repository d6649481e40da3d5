"""Do a block's operands have the sizes that the op asks for, at every size that the graph takes?

A proof gives all operands the same number of sequences and tokens. A graph may do otherwise: queries of one sequence
over the latents of another, one latent for a whole batch, a mask longer than the keys.
"""

from __future__ import annotations

import onnx_ir as ir

from ...custom_ops.common.refusal import Refusal
from ..candidate import Candidate
from ..cleanup.rms_norm import rms_norm_of
from ..graph import GraphView, attribute_int, is_op, rank_of
from .linear import Lin, of_dim, parse

#: Operands of which the graph has as many as the op wants, or one that it spreads: adding and multiplying asks for it.
_SPREAD = ("cos", "sin", "q_scale", "attn_mask")


def size_refusal(view: GraphView, candidate: Candidate, keys_only: bool) -> Refusal | None:
    """Why sizes may differ where the op wants them equal, or None.

    Args:
        keys_only: the mask is looked up by the key's place, so that nothing in the graph makes it as long as the keys.
    """
    first: dict[str, tuple[str, ir.Value, int, Lin | None]] = {}
    for name, operand in candidate.operands.items():
        for number, piece in enumerate(operand.pieces):
            for axis, label in enumerate(piece.axes):
                if label is None or piece.value.shape is None or axis >= len(piece.value.shape):
                    continue
                size = _known(piece.value, axis)
                if not label.isidentifier() or (name == "attn_mask" and keys_only and label != "batch"):
                    wanted = _sum(label, first)
                    if (keys_only and (size is None or size != wanted)) or _differ(size, wanted):
                        return _refusal(name, label, size, wanted)
                    continue
                if label not in first:
                    first[label] = (name, piece.value, axis, size)
                    continue
                _, value, at, known = first[label]
                if name in _SPREAD:
                    # rows of a mask for a query each: one query takes any number of them, and becomes as many
                    open_ = name == "attn_mask" and size is None and known is not None and known.number == 1
                    if open_ or _differ(size, known):
                        return _refusal(name, label, size, known)
                elif size is None or known is None:
                    if (number or name in ("latent", "k_rope")) and not _same_origin(
                        view, value, at, piece.value, axis
                    ):
                        return _refusal(name, label, size, known)
                elif size != known and not (label in ("batch", "past") and _joined(candidate, name, size, known)):
                    return _refusal(name, label, size, known)
    return None


def _joined(candidate: Candidate, name: str, size: Lin, known: Lin) -> bool:
    """Is it a cache that new tokens are joined to? `Concat` wants as many rows of it as there are of them; and as many
    tokens are in both of a block's caches, since keys of one and values of the other, or both parts of a key, meet."""
    growing = name.startswith("past_") and not candidate.config.static_cache
    return growing and (size.number is None or known.number is None)


def _known(value: ir.Value, axis: int) -> Lin | None:
    assert value.shape is not None
    dim = value.shape[axis]
    unknown = not isinstance(dim, int) and (dim.value is None or str(dim.value).startswith("unk__"))  # onnx's inference
    return None if unknown else of_dim(dim, value, axis)


def _sum(label: str, first: dict[str, tuple[str, ir.Value, int, Lin | None]]) -> Lin | None:
    """The number that a sum of labels stands for."""
    parsed = parse(label)
    if parsed is None:
        return None
    total = Lin(parsed.const)
    for name, factor in parsed.terms:
        known = first[name][3] if isinstance(name, str) and name in first else None
        if known is None:
            return None
        total += known.times(factor)
    return total


def _differ(a: Lin | None, b: Lin | None) -> bool:
    """Are they sure to differ at some size: a number and another, or a number and a symbol?"""
    if a is None or b is None or a == b:
        return False
    return a.number is not None or b.number is not None


def _same_origin(view: GraphView, a: ir.Value, a_axis: int, b: ir.Value, b_axis: int) -> bool:
    """Are both made of one value, row by row?"""
    if a_axis != b_axis or rank_of(a) != rank_of(b):
        return False
    return not set(_origins(view, a)).isdisjoint(_origins(view, b))


def _origins(view: GraphView, value: ir.Value) -> list[ir.Value]:
    """The value and what it is made of by steps that keep all axes but the last: linear layers, cuts, norms."""
    found = [value]
    while (producer := value.producer()) is not None and len(found) < 32:
        norm = rms_norm_of(value)
        source = norm.x if norm is not None else producer.inputs[0] if producer.inputs else None
        if norm is None and is_op(producer, "Add", "Mul") and source is not None and view.is_const(source):
            source = producer.inputs[1]
        rank = rank_of(value)
        if source is None or rank is None or rank_of(source) != rank:
            break
        cut = is_op(producer, "Split") and attribute_int(producer, "axis", 0) % rank == rank - 1
        if is_op(producer, "Slice") and len(producer.inputs) > 3:
            cut = [a % rank for a in view.ints(producer.inputs[3]) or ()] == [rank - 1]
        layer = view.is_linear(producer) and producer.inputs[0] is source
        constant = is_op(producer, "Add", "Mul") and any(v is not None and view.is_const(v) for v in producer.inputs)
        if not (norm is not None or cut or layer or constant or is_op(producer, "Cast", "Identity")):
            break
        value = source
        found.append(value)
    return found


def _refusal(name: str, label: str, size: Lin | None, wanted: Lin | None) -> Refusal:
    shown = ["an unknown number" if s is None else _text(s) for s in (size, wanted)]
    return Refusal(
        "sizes",
        f"{name} has {shown[0]} along {label}, the op wants {shown[1]} there: nothing in the graph says that they are "
        "equal at every size",
    )


def _text(size: Lin) -> str:
    parts = [f"{factor} * {atom}" if factor != 1 else str(atom) for atom, factor in size.terms]
    return " + ".join([*parts, *([str(size.const)] if size.const or not parts else [])])
