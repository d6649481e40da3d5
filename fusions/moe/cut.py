"""A smaller, sound proof for experts of real size: the same block with a few of its channels.

Hidden and intermediate channels are followed through every node. Each must treat them alike: element by element, moved
as a whole, or summed over in a matrix product. Then the block with some of its channels is the block itself on weights
and tokens that are zero elsewhere, and what it does with the rest is the same. Experts, groups and choices are never
cut: everything that decides runs at its full size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import onnx_ir as ir

from ...custom_ops.moe.spec import BIASES
from ..candidate import Candidate
from ..dims import symbol
from ..graph import GraphView
from ..proof.extract import Cut, Extract
from ..proof.shrink import Shrunk
from ..proof.spread import HeadsMix
from .block import MoeCandidate, Slabs, bias_parameter, matrix_parameters, vector, weight_format
from .channel_writer import Kept, Kinds
from .channels import Channels
from .constants import Drawn
from .slabs import Slab
from .stored import Part, Quantized, Seen

#: Channels that stay at each end of an axis, at least.
HIDDEN, INTER = 16, 8

KeptOf = dict[ir.Value, Kinds]


def _ends(size: int, each: int, unit: int) -> tuple[int, ...]:
    """The first and the last channels, in whole blocks."""
    count = -(-each // unit) * unit
    if 2 * count >= size:
        return tuple(range(size))
    last = size - max(count, size % unit)
    last -= last % unit
    return (*range(count), *range(last, size))


def shrink(view: GraphView, candidate: Candidate, extract: Extract, arrays: Mapping[ir.Value, np.ndarray]) -> Shrunk:
    """Cut a block down to a few hidden and intermediate channels.

    Raises:
        HeadsMix: a node that does not treat the channels alike, or one without a rule.
    """
    assert isinstance(candidate, MoeCandidate)
    config = candidate.config
    unit = max(1, config.block_size, config.shared_block_size, *_row_units(candidate))
    hidden = _ends(config.hidden_size, HIDDEN, unit)
    inter = _ends(config.intermediate_size, INTER, unit)
    shared = _ends(config.shared_intermediate_size, INTER, unit) if config.shared_intermediate_size else ()
    kept: KeptOf = {}
    axes: dict[str, tuple[tuple[int, ...] | None, tuple[int, ...] | None]] = {
        "router": (None, hidden),
        "shared_gate": (None, hidden),
        "gate_up": (inter, hidden),
        "down": (hidden, inter),
        "shared_gate_up": (shared, hidden),
        "shared_down": (hidden, shared),
        "gate_up_bias": (inter, None),
        "down_bias": (hidden, None),
        "shared_gate_up_bias": (shared, None),
        "shared_down_bias": (hidden, None),
    }
    for name, matrix in candidate.slabs.items():
        rows, cols = axes[name]
        for pieces in matrix:
            for slab in pieces:
                _keep(slab, rows, cols, kept)
    dims = {v: _dims(v, k) for v, k in kept.items()}
    slabs = {
        name: tuple(tuple(_cut_slab(s, axes[name][0], kept) for s in pieces) for pieces in matrix)
        for name, matrix in candidate.slabs.items()
    }
    small = replace(config, hidden_size=len(hidden), intermediate_size=len(inter), shared_intermediate_size=len(shared))
    part = replace(candidate, config=small, slabs=slabs)
    part.parameters = _parameters(part)
    part.results = {
        n: replace(r, reshape=_reshaped(r.reshape, config.hidden_size, len(hidden))) for n, r in part.results.items()
    }
    drawn = Drawn(part, 20261130, dims)
    x = candidate.operands["x"].pieces[0].value
    rank = len(x.shape or ())
    kept[x] = {rank - 1: Kept(hidden, config.hidden_size)}
    for parameter in part.parameters.values():
        for source in parameter.sources:
            kept.setdefault(source, {})
    channels = Channels(view, kept, lambda value: drawn[value])
    channels.run(extract.nodes)
    for target in extract.outputs:
        found = channels.kinds.get(target, {})
        if set(found) != {len(target.shape or ()) - 1} or next(iter(found.values())).indices != hidden:
            raise HeadsMix("the result does not have the hidden channels where the op has them")
    shapes = {x: [*_leading(x, rank), len(hidden)]}

    def parameters(_: Candidate, __: Mapping[ir.Value, np.ndarray]) -> dict[str, np.ndarray]:
        from ..parameters import parameter_arrays

        return parameter_arrays(view, part, drawn)

    share = len(hidden) * len(inter) / (config.hidden_size * config.intermediate_size)
    cut = Cut(channels.protos, list(channels.tensors.values()), shapes)
    return Shrunk(part, (len(hidden), len(inter)), share, cut, parameters)


def _leading(x: ir.Value, rank: int) -> list[int | str | None]:
    return [d if isinstance(d, int) else symbol(d) for d in list(x.shape or ())[: rank - 1]]


def _reshaped(shape: tuple[int, ...] | None, hidden: int, now: int) -> tuple[int, ...] | None:
    return None if shape is None else (*shape[:-1], now if shape[-1] == hidden else shape[-1])


def _row_units(candidate: MoeCandidate) -> list[int]:
    """Sizes of blocks along any axis of the stored matrices."""
    return [
        part.quantized.block
        for matrix in candidate.slabs.values()
        for pieces in matrix
        for slab in pieces
        for part in slab.seen.parts
        if part.quantized is not None and part.quantized.block
    ] or [1]


def _positions(slab: Slab, rows: tuple[int, ...] | None) -> list[int]:
    """Which of the slab's rows stay: those of gate and of up, where it has both."""
    if rows is None:
        return list(range(len(slab.rows)))
    whole = _whole(slab, rows)
    chosen = set(rows)
    return [p for p in range(len(slab.rows)) if p % whole in chosen]


def _whole(slab: Slab, rows: tuple[int, ...]) -> int:
    """How many channels the rows are numbered by: the slab has them once, or twice with gate and up."""
    count = len(slab.rows)
    return count // 2 if count % 2 == 0 and rows[-1] < count // 2 else count


def _keep(slab: Slab, rows: tuple[int, ...] | None, cols: tuple[int, ...] | None, kept: KeptOf) -> None:
    for part in slab.seen.parts:
        wanted = {} if cols is None else {slab.into: list(cols)}
        if rows is not None:
            wanted[slab.out] = sorted({slab.rows[p] for p in _positions(slab, rows)})
        for axis, indices in wanted.items():
            where = slab.seen.axes[axis]
            if where is None or where < 0:
                raise HeadsMix("channels along an axis that was inserted")
            picks = dict(part.picks).get(where)
            _add(part.source, where, indices if picks is None else [picks[i] for i in indices], kept)
            if part.quantized is not None:
                for value in (part.quantized.scale, part.quantized.zero):
                    if value is not None:
                        _keep_scale(value, part, part.quantized, where, kept)


def _add(value: ir.Value, axis: int, indices: list[int], kept: KeptOf) -> None:
    size = value.shape[axis] if value.shape is not None else None
    if not isinstance(size, int):
        raise HeadsMix(f"the shape of {value.name!r} is not known")
    own = kept.setdefault(value, {})
    before = own[axis].indices if axis in own else ()
    own[axis] = Kept(tuple(sorted({*before, *indices})), size)


def _keep_scale(value: ir.Value, part: Part, quantized: Quantized, axis: int, kept: KeptOf) -> None:
    dims = list(value.shape or ())
    source = part.source.shape
    assert source is not None
    if len(dims) == len(source) and len(dims) > 1:
        if dims[axis] == 1:
            return
        indices = kept[part.source][axis].indices
        if quantized.block and quantized.axis == axis:
            indices = tuple(sorted({i // quantized.block for i in indices}))
        _add(value, axis, list(indices), kept)
    elif len(dims) == 1 and dims[0] != 1 and quantized.axis == axis:
        _add(value, 0, list(kept[part.source][axis].indices), kept)


def _dims(value: ir.Value, kinds: Kinds) -> tuple[int, ...]:
    return tuple(len(kinds[i].indices) if i in kinds else int(d) for i, d in enumerate(value.shape or ()))  # type: ignore[arg-type]


def _cut_slab(slab: Slab, rows: tuple[int, ...] | None, kept: KeptOf) -> Slab:
    """The slab of the cut sources: indices that are seen, numbered anew."""
    parts = tuple(_cut_part(p, kept) for p in slab.seen.parts)
    part = slab.seen.parts[0]
    where = slab.seen.axes[slab.out]
    assert where is not None
    numbers: dict[int, int] = {}
    kinds = kept.get(part.source, {})
    line = dict(part.picks).get(where)
    size = slab.seen.shape[slab.out]
    stays = set(kinds[where].indices) if where in kinds else None
    for old in range(size):
        source = old if line is None else line[old]
        if stays is None or source in stays:
            numbers[old] = len(numbers)
    chosen = tuple(numbers[slab.rows[p]] for p in _positions(slab, rows))
    return Slab(Seen(parts, slab.seen.axes), slab.expert, slab.out, slab.into, chosen)


def _cut_part(part: Part, kept: KeptOf) -> Part:
    kinds = kept.get(part.source, {})
    picks = []
    for axis, indices in part.picks:
        if axis in kinds:
            place = {index: i for i, index in enumerate(kinds[axis].indices)}
            indices = tuple(place[i] for i in indices if i in place)
        picks.append((axis, indices))
    return Part(part.source, tuple(picks), part.quantized)


def _parameters(part: MoeCandidate) -> dict:
    """The parameters of the cut candidate."""
    config, found = part.config, dict(part.parameters)
    groups: list[list[str]] = [["gate_up", "down"], ["shared_gate_up", "shared_down"]]
    for names in groups:
        matrices: list[Slabs] = [part.slabs[n] for n in names if n in part.slabs]
        if not matrices:
            continue
        form = weight_format(matrices)
        assert isinstance(form, tuple)
        for name in names:
            found |= matrix_parameters(name, part.slabs[name], form[0], form[2], ir.DataType.FLOAT)
    for name, parameter in (("router", "router_weight"), ("shared_gate", "shared_gate_weight")):
        if name in part.slabs:
            slab = part.slabs[name][0][0]
            found[parameter] = replace(found[parameter], compute=_numbers(slab))
    for name in BIASES:
        if name in part.slabs:
            found[name] = bias_parameter(name, part.slabs[name])
    for name, source in part.vectors.items():
        found[name] = vector(name, source, config.num_experts)
    return {n: found[n] for n in part.parameters}


def _numbers(slab: Slab):  # type: ignore[no-untyped-def]
    return lambda arrays: slab.numbers(dict(zip(slab.values(), arrays, strict=True)))
