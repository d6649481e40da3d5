"""Cut a frozen block and its candidate down to two heads, where the region is shown to keep heads apart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import onnx_ir as ir

from ...custom_ops.mla.spec import MlaConfig
from ..candidate import Candidate, Operand, Result
from ..graph import GraphView
from ..parameters import parameter_arrays
from ..proof.extract import Cut, Extract
from ..proof.heads import HeadSlicer
from ..proof.shrink import Shrunk
from ..proof.spread import HeadsMix, Spread, shape_of

Arrays = dict[str, np.ndarray]


def shrink(view: GraphView, candidate: Candidate, extract: Extract, arrays: Mapping[ir.Value, np.ndarray]) -> Shrunk:
    """Cut to the first and the last head.

    Raises:
        HeadsMix: the region can't be shown to keep heads apart.
    """
    config: MlaConfig = candidate.config
    heads = (0, config.num_heads - 1)
    if config.num_heads <= len(heads):
        raise HeadsMix(f"it has {config.num_heads} heads only")
    inputs = _inputs(candidate)
    shapes = {value: list(shape_of(value)) for value in inputs}

    def constant(value: ir.Value) -> np.ndarray:
        array = arrays.get(value)
        if array is None:
            array = view.array(value)
        if array is None:
            raise HeadsMix(f"the constant {value.name!r} can't be read")
        return array.astype(np.float32) if array.dtype.kind not in "iub?" else array

    parameters = {s for p in candidate.parameters.values() for s in p.sources}
    spreads = {**inputs, **_weights(candidate)}
    slicer = HeadSlicer(view, heads, spreads, constant, parameters, shared=config.num_heads)
    protos = [ir.serde.serialize_node(n) for n in extract.nodes]
    slicer.run(extract.nodes, protos)
    for name, result in candidate.results.items():
        _check_result(config, name, result, slicer)
    for value, spread in inputs.items():
        shapes[value][spread.axis] = slicer.kept_count(spread)
    return Shrunk(
        _reduced(candidate, len(heads)),
        heads,
        len(heads) / config.num_heads,
        Cut(protos, list(slicer.tensors.values()), shapes),
        lambda whole, given: _parameters(config, heads, parameter_arrays(view, whole, given)),
    )


def _each(heads: int, width: int) -> tuple[int, ...]:
    return tuple(h for h in range(heads) for _ in range(width))


def _inputs(candidate: Candidate) -> dict[ir.Value, Spread]:
    """Where heads lie in the region's inputs."""
    config: MlaConfig = candidate.config
    heads = config.num_heads
    found: dict[ir.Value, Spread] = {}
    queries = candidate.operands["q"].pieces
    widths = [config.qk_head_dim] if len(queries) == 1 else [config.qk_nope_head_dim, config.qk_rope_head_dim]
    gates = candidate.operands["gate"].pieces if "gate" in candidate.operands else ()
    for piece, width in (*zip(queries, widths, strict=True), *((g, 1) for g in gates)):
        shape = shape_of(piece.value)
        if piece.permutation is not None:
            found[piece.value] = Spread(1, tuple(range(heads)))
        elif shape[-1] == heads * width:
            found[piece.value] = Spread(len(shape) - 1, _each(heads, width))
        else:
            found[piece.value] = Spread(len(shape) - 2, tuple(range(heads)))
    for name in ("past_key", "past_value"):
        if name in candidate.operands:
            found[candidate.operands[name].pieces[0].value] = Spread(1, tuple(range(heads)))
    if config.has_mask:
        shape = shape_of(candidate.operands["attn_mask"].pieces[0].value)
        if len(shape) == 4 and shape[1] != 1:
            raise HeadsMix("a mask with entries for each head")
    return found


def _weights(candidate: Candidate) -> dict[ir.Value, Spread]:
    """Where heads lie in kv_b's constants."""
    config: MlaConfig = candidate.config
    heads, nope, value = config.num_heads, config.qk_nope_head_dim, config.v_head_dim
    parameter = candidate.parameters.get("kv_b_weight")
    if parameter is None:
        raise HeadsMix("quantized weights")
    order = parameter.form.split(" ")[0] or "heads"
    if order == "absorbed":
        raise HeadsMix("absorbed weights")
    if order == "heads":
        owners = [_each(heads, nope + value)]
    elif order == "parts":
        owners = [_each(heads, nope) + _each(heads, value)]
    else:
        owners = [_each(heads, nope), _each(heads, value)]
    found: dict[ir.Value, Spread] = {}
    for source, owner in zip(parameter.sources, owners, strict=False):
        shape = shape_of(source)
        if len(shape) != 2 or len(owner) not in shape or shape[0] == shape[1]:
            raise HeadsMix("weights whose heads are not one axis")
        found[source] = Spread(shape.index(len(owner)), owner)
    return found


def _parameters(config: MlaConfig, heads: tuple[int, ...], full: Arrays) -> Arrays:
    width = config.qk_nope_head_dim + config.v_head_dim
    kept = np.concatenate([np.arange(h * width, (h + 1) * width) for h in heads])
    return {n: a[:, kept] if n == "kv_b_weight" else a for n, a in full.items()}


def _check_result(config: MlaConfig, name: str, result: Result, slicer: HeadSlicer) -> None:
    """The region's results must have their heads where the op's have them."""
    expected: Spread | None = None
    target = result.targets[0]
    if name == "o":
        rank = len(shape_of(target))
        if rank == 4:
            expected = Spread(2 if result.permutation is None else 1, tuple(range(config.num_heads)))
        else:
            expected = Spread(rank - 1, _each(config.num_heads, config.v_head_dim))
    elif name in ("present_key", "present_value"):
        expected = Spread(1, tuple(range(config.num_heads)))
    if slicer.spreads.get(target) != expected:
        raise HeadsMix(f"{name} does not have its heads where the op has them")


def _reduced(candidate: Candidate, heads: int) -> Candidate:
    """The candidate with fewer heads."""
    config: MlaConfig = candidate.config
    whole = config.num_heads

    def operand(name: str, item: Operand) -> Operand:
        if name not in ("q", "gate"):
            return item

        def fewer(dims: tuple[int, ...] | None) -> tuple[int, ...] | None:
            """Heads lie on the third axis, alone or with their channels."""
            return None if dims is None else (*dims[:2], dims[2] * heads // whole, *dims[3:])

        pieces = tuple(replace(p, reshape=fewer(p.reshape)) for p in item.pieces)
        return replace(item, pieces=pieces, reshape=fewer(item.reshape))

    def result(name: str, item: Result) -> Result:
        shape = item.reshape
        if name != "o" or shape is None:
            return item
        at = 2 if len(shape) == 4 else len(shape) - 1
        return replace(item, reshape=(*shape[:at], shape[at] * heads // whole, *shape[at + 1 :]))

    return replace(
        candidate,
        config=replace(config, num_heads=heads),
        operands={n: operand(n, o) for n, o in candidate.operands.items()},
        results={n: result(n, r) for n, r in candidate.results.items()},
    )
