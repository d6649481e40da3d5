"""Cut a frozen KDA region and its candidate down to two heads, where the region is shown to keep heads apart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import onnx_ir as ir

from ...custom_ops.kda.spec import KdaConfig
from ..candidate import Candidate, Operand, Result
from ..graph import GraphView
from ..parameters import parameter_arrays
from ..proof.extract import Cut, Extract
from ..proof.heads import HeadSlicer
from ..proof.shrink import Shrunk
from ..proof.spread import HeadsMix, Spread, shape_of

Arrays = dict[str, np.ndarray]


def cut_parameters(config: KdaConfig, heads: tuple[int, ...], full: Arrays) -> Arrays:
    """The op's parameters, cut to the heads that stay."""
    owners = {**operand_owners(config), "conv_weight": packed_owner(config), "conv_bias": packed_owner(config)}
    owners |= {"A_log": owners["beta"], "dt_bias": owners["g"]}
    keep = set(heads)
    return {
        name: array if name not in owners else array[[i for i, h in enumerate(owners[name]) if h in keep]]
        for name, array in full.items()
    }


def packed_owner(config: KdaConfig) -> list[int]:
    """The head of each channel of q | k | v."""
    owners = operand_owners(config, packed=False)
    return [*owners["q"], *owners["k"], *owners["v"]]


def operand_owners(config: KdaConfig, packed: bool | None = None) -> dict[str, list[int]]:
    """The query head that each channel of an operand belongs to (a value head: the query head that serves it)."""
    ratio = config.num_v_heads // config.num_heads
    keys = [i // config.head_dim for i in range(config.num_heads * config.head_dim)]
    values = [i // config.head_v_dim // ratio for i in range(config.num_v_heads * config.head_v_dim)]
    owners = {
        "q": keys,
        "k": keys,
        "v": values,
        "g": [i // config.head_dim // ratio for i in range(config.num_v_heads * config.head_dim)],
        "beta": [i // ratio for i in range(config.num_v_heads)],
        "gate": values,
        "o": values,
    }
    if config.packed_qkv if packed is None else packed:
        owners["q"] = [*keys, *keys, *values]
    return owners


def shrink(view: GraphView, candidate: Candidate, extract: Extract, arrays: Mapping[ir.Value, np.ndarray]) -> Shrunk:
    """Cut to the first and the last query head.

    Args:
        arrays: constants in place of the graph's own (perturbed parameters).

    Raises:
        HeadsMix: the region can't be shown to keep heads apart.
    """
    config = candidate.config
    heads = (0, config.num_heads - 1)
    if config.num_heads <= len(heads):
        raise HeadsMix(f"it has {config.num_heads} heads only")
    spreads, shapes = _inputs(candidate)

    def constant(value: ir.Value) -> np.ndarray:
        array = arrays.get(value)
        if array is None:
            array = view.array(value)
        if array is None:
            raise HeadsMix(f"the constant {value.name!r} can't be read")
        return array.astype(np.float32) if array.dtype.kind not in "iub?" else array

    parameters = {s for p in candidate.parameters.values() for s in p.sources}
    slicer = HeadSlicer(view, heads, spreads, constant, parameters)
    protos = [ir.serde.serialize_node(n) for n in extract.nodes]
    slicer.run(extract.nodes, protos)
    for name, result in candidate.results.items():
        _check_result(config, name, result, slicer)
    for value, spread in spreads.items():
        shapes[value][spread.axis] = slicer.kept_count(spread)
    tensors = list(slicer.tensors.values())
    dims: dict[ir.Value, list[int | str | None]] = {value: list(shape) for value, shape in shapes.items()}
    return Shrunk(
        _reduced(candidate, len(heads)),
        heads,
        len(heads) / config.num_heads,
        Cut(protos, tensors, dims),
        lambda whole, given: cut_parameters(config, heads, parameter_arrays(view, whole, given)),
    )


def _inputs(candidate: Candidate) -> tuple[dict[ir.Value, Spread], dict[ir.Value, list[int]]]:
    """Where heads lie in the region's inputs, from the candidate's layout."""
    owners = operand_owners(candidate.config)
    spreads: dict[ir.Value, Spread] = {}
    shapes: dict[ir.Value, list[int]] = {}
    for name, operand in candidate.operands.items():
        if name == "initial_state":
            value = operand.pieces[0].value
            spreads[value] = Spread(1, tuple(owners["beta"]))
            shapes[value] = shape_of(value)
            continue
        if name == "conv_state":
            start, packed = 0, packed_owner(candidate.config)
            for piece in operand.pieces:
                shape = shape_of(piece.value)
                spreads[piece.value] = Spread(1, tuple(packed[start : start + shape[1]]))
                shapes[piece.value] = shape
                start += shape[1]
            continue
        piece = operand.pieces[0]
        raw = shape_of(piece.value)
        order = list(piece.permutation) if piece.permutation is not None else list(range(len(raw)))
        lead = 1 if piece.adds_time else 2
        line = np.array(owners[name]).reshape([1] * lead + [raw[i] for i in order[lead:]])
        owner = np.transpose(line, np.argsort(order))
        spreads[piece.value] = _spread(owner)
        shapes[piece.value] = raw
    return spreads, shapes


def _spread(owner: np.ndarray) -> Spread:
    varying = [i for i in range(owner.ndim) if np.any(np.take(owner, [0], i) != owner)]
    if len(varying) != 1:
        raise HeadsMix("heads are not one axis of an operand")
    line = np.moveaxis(owner, varying[0], -1).reshape(-1, owner.shape[varying[0]])[0]
    return Spread(varying[0], tuple(int(h) for h in line))


def _check_result(config: KdaConfig, name: str, result: Result, slicer: HeadSlicer) -> None:
    """The region's results must have their heads where the op's have them."""
    if name == "o":
        owner = np.array(operand_owners(config)["o"]).reshape(1, 1, -1)
        if result.reshape is not None:
            tail = [d for d in result.reshape if d > 0]
            owner = owner.reshape([1] * (len(result.reshape) - len(tail)) + tail)
        if result.permutation is not None:
            owner = np.transpose(owner, result.permutation)
        expected = [_spread(owner)]
    elif name == "final_state":
        expected = [Spread(1, tuple(operand_owners(config)["beta"]))]
    else:
        packed, start, expected = packed_owner(config), 0, []
        for size in result.sizes or (len(packed),):
            expected.append(Spread(1, tuple(packed[start : start + size])))
            start += size
    for target, spread in zip(result.targets, expected, strict=True):
        if slicer.spreads.get(target) != spread:
            raise HeadsMix(f"{name} does not have its heads where the op has them")


def _reduced(candidate: Candidate, heads: int) -> Candidate:
    """The candidate with fewer heads: every count of heads or channels shrinks in proportion."""
    config = candidate.config
    whole = config.num_heads

    def less(count: int) -> int:
        return count * heads // whole

    def operand(item: Operand) -> Operand:
        pieces = tuple(
            replace(p, reshape=None if p.reshape is None else (*p.reshape[:2], less(p.reshape[2]))) for p in item.pieces
        )
        return replace(item, pieces=pieces)

    def result(item: Result) -> Result:
        shape = item.reshape
        if shape is not None:
            shape = (shape[0], less(shape[1])) if len(shape) == 2 else (*shape[:2], less(shape[2]), *shape[3:])
        return replace(item, reshape=shape, sizes=tuple(less(s) for s in item.sizes))

    return replace(
        candidate,
        config=replace(config, num_heads=heads, num_v_heads=less(config.num_v_heads)),
        operands={n: operand(o) for n, o in candidate.operands.items()},
        results={n: result(r) for n, r in candidate.results.items()},
    )
