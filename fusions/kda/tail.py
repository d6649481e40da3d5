"""Behind the recurrence: RMS norm and output gate, found as the factors of one product."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from ..cleanup.rms_norm import rms_norm_of
from ..graph import GraphView, attribute_float, attribute_string, is_op
from ..match import denominator, match_silu, reciprocal_norm, same, same_elements, through, uncast


@dataclass(frozen=True)
class Tail:
    """What lies between the recurrence's output ``o`` and ``x``: ``x = norm(o) * weight * act(gate)``.

    ``epsilon`` is None without a norm; ``weights`` are constant factors; ``gate`` is None without a gate.
    """

    x: ir.Value
    o: ir.Value
    epsilon: float | None = None
    weights: tuple[ir.Value, ...] = ()
    gate: ir.Value | None = None
    activation: str = "none"


def match_tail(view: GraphView, x: ir.Value, depends: set[ir.Value]) -> Tail:
    """The tail that ends in ``x``; an empty one (``o`` is ``x``) when nothing was recognised.

    Args:
        x: the value that enters the output projection.
        depends: values that depend on the recurrence: they tell ``o`` from the gate.
    """
    core = through(x, "Reshape", "Cast", "Identity", "Transpose", "Squeeze", "Unsqueeze", "Flatten")
    empty = Tail(x, x)
    if core is None:
        return empty
    producer = core.producer()
    if producer is not None and producer.op_type == "GatedRMSNorm" and len(producer.inputs) == 3:
        o, weight, gate = producer.inputs
        if o is None or weight is None or gate is None:
            return empty
        activation = attribute_string(producer, "activation", "silu").replace("swish", "silu")
        return Tail(x, o, attribute_float(producer, "epsilon", 1e-5), (weight,), gate, activation)
    return _product(view, x, core, depends) or empty


def _factors(view: GraphView, value: ir.Value, stop: ir.Value | None, depth: int = 8) -> list[tuple[ir.Value, bool]]:
    """(factor, inverted) of a product; casts are seen through; ``stop`` is not taken apart."""
    bare = uncast(value)
    assert bare is not None
    if (
        (stop is not None and same_elements(bare, stop))
        or depth == 0
        or (rms_norm_of(bare) is not None and _native(bare))
    ):
        return [(bare, False)]
    producer = bare.producer()
    if is_op(producer, "Mul") and producer is not None and None not in producer.inputs:
        return [f for v in producer.inputs for f in _factors(view, v, stop, depth - 1)]  # type: ignore[arg-type]
    if is_op(producer, "Div") and producer is not None and None not in producer.inputs:
        above, below = producer.inputs
        return [*_factors(view, above, stop, depth - 1), (below, True)]  # type: ignore[arg-type,list-item]
    return [(bare, False)]


def _native(value: ir.Value) -> bool:
    producer = value.producer()
    return producer is not None and not is_op(producer, "Mul", "Div")


def _product(view: GraphView, x: ir.Value, core: ir.Value, depends: set[ir.Value]) -> Tail | None:
    normed, epsilon = _norm_in(view, core)
    weights: list[ir.Value] = []
    gates: list[ir.Value] = []
    sigmoids: list[ir.Value] = []
    silus: list[ir.Value] = []
    main: list[ir.Value] = []
    for factor, inverted in _factors(view, core, normed):
        native = rms_norm_of(factor) if _native(factor) else None
        if view.is_const(factor) and not inverted:
            weights.append(factor)
        elif native is not None and normed is None and native.x in depends:
            normed, epsilon = native.x, native.epsilon
            main.append(native.x)
            if native.weight is not None:
                weights.append(native.weight)
        elif normed is not None and _is_norm_of(view, factor, inverted, normed):
            continue
        elif inverted:
            return None
        elif normed is not None and same_elements(factor, normed):
            main.append(normed)
        elif (inner := _sigmoid_of(factor)) is not None and inner not in depends:
            sigmoids.append(inner)
        elif (
            (producer := factor.producer()) is not None
            and (silu := match_silu(view, producer)) is not None
            and (silu not in depends)
        ):
            silus.append(silu)
        elif factor in depends:
            main.append(factor)
        else:
            gates.append(factor)
    if len(main) != 1 or main[0] is core or main[0] not in depends:
        return None
    gate, activation = _gate_of(gates, sigmoids, silus)
    if activation == "unknown" or (gate is None and epsilon is None) or (weights and epsilon is None):
        return None
    return Tail(x, main[0], epsilon, tuple(weights), gate, activation)


def _norm_in(view: GraphView, core: ir.Value) -> tuple[ir.Value | None, float | None]:
    """The decomposed RMS norm among the factors: (its input, epsilon)."""
    for factor, inverted in _factors(view, core, None):
        if inverted:
            found = denominator(view, factor)
        else:
            found = reciprocal_norm(view, factor)
        if found is not None and found.kind == "rms":
            return found.x, found.epsilon
    return None, None


def _is_norm_of(view: GraphView, factor: ir.Value, inverted: bool, normed: ir.Value) -> bool:
    found = denominator(view, factor) if inverted else reciprocal_norm(view, factor)
    return found is not None and found.kind == "rms" and same_elements(found.x, normed)


def _sigmoid_of(value: ir.Value) -> ir.Value | None:
    producer = value.producer()
    return producer.inputs[0] if is_op(producer, "Sigmoid") and producer is not None else None


def _gate_of(gates: list[ir.Value], sigmoids: list[ir.Value], silus: list[ir.Value]) -> tuple[ir.Value | None, str]:
    if not gates and not sigmoids and not silus:
        return None, "none"
    if len(silus) == 1 and not gates and not sigmoids:
        return silus[0], "silu"
    if len(sigmoids) == 1 and not silus:
        if not gates:
            return sigmoids[0], "sigmoid"
        if len(gates) == 1 and same(gates[0], sigmoids[0]):
            return sigmoids[0], "silu"
    return None, "unknown"
