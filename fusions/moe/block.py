"""A block that was read: the op's configuration, operands and parameters from router, experts and shared expert."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from ...custom_ops.common.refusal import Refusal
from ...custom_ops.moe.packing import STORED, ZERO_POINTS, packed_shape
from ..candidate import Candidate, Parameter
from ..graph import static_dims
from .forms import Routed
from .linear import Linear
from .mlp import Mlp
from .reader import Reader
from .router import Router
from .slabs import FORMATS, Arrays, Slab, as_held, block_of, joined
from .tail import Shared

Slabs = tuple[tuple[Slab, ...], ...]
HALF = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


@dataclass
class MoeCandidate(Candidate):
    """A candidate with the graph's weights behind its parameters: for each matrix the experts' slabs (a single entry
    where one stack holds all), and the constants of the router."""

    slabs: dict[str, Slabs] = field(default_factory=dict)
    vectors: dict[str, ir.Value] = field(default_factory=dict)


def matrices(mlps: Sequence[Mlp]) -> tuple[Slabs, Slabs]:
    """(gate and up joined, down) of experts, in order."""
    gate_up, down = [], []
    for mlp in mlps:
        pieces = [Slab.of(mlp.gate.linear, mlp.gate.rows)]
        if mlp.up is not None:
            pieces.append(Slab.of(mlp.up.linear, mlp.up.rows))
            one = _one_slab(*pieces)
            pieces = pieces if one is None else [one]
        gate_up.append(tuple(pieces))
        down.append((Slab.of(mlp.down),))
    return tuple(gate_up), tuple(down)


def biases(mlps: Sequence[Mlp]) -> dict[str, Slabs] | Refusal:
    """The biases of experts, in order, by "gate_up" and "down": slabs of one column. Empty where there are none."""
    found: dict[str, Slabs] = {}
    for name in ("gate_up", "down"):
        of_all = []
        for mlp in mlps:
            halves = [(mlp.gate.linear, mlp.gate.rows), *([] if mlp.up is None else [(mlp.up.linear, mlp.up.rows)])]
            layers = halves if name == "gate_up" else [(mlp.down, tuple(range(mlp.down.width)))]
            pieces = tuple(Slab.of_bias(layer, rows) for layer, rows in layers if layer.bias is not None)
            if any(
                p.expert is None and layer.expert is not None for p, (layer, _) in zip(pieces, layers, strict=False)
            ):
                return Refusal("biases", f"a bias of {name} that all experts share")
            of_all.append(pieces)
        if len({len(pieces) for pieces in of_all}) != 1:
            return Refusal("biases", f"some experts have a bias of {name} and some have not")
        if of_all[0]:
            found[name] = tuple(of_all)
    return found


def bias_parameter(name: str, slabs: Slabs) -> Parameter:
    """The biases of a matrix as the op has them, float32."""
    values = tuple(dict.fromkeys(v for pieces in slabs for s in pieces for v in s.values()))

    def compute(arrays: Sequence[np.ndarray]) -> np.ndarray | None:
        whole = joined(slabs, dict(zip(values, arrays, strict=True)), lambda s, a: s.numbers(a))
        if whole is None:
            return None
        alone = len(slabs) == 1 and slabs[0][0].expert is None and not name.startswith("shared_")
        return np.ascontiguousarray((whole[None] if alone else whole)[..., 0].astype(np.float32))

    return Parameter(values, compute, form=f"{name} {_form(slabs)}")


def _one_slab(gate: Slab, up: Slab) -> Slab | None:
    """Gate and up of one matrix as one slab."""
    if (gate.seen, gate.expert, gate.out, gate.into) != (up.seen, up.expert, up.out, up.into):
        return None
    return Slab(gate.seen, gate.expert, gate.out, gate.into, gate.rows + up.rows)


def weight_format(slabs: Sequence[Slabs]) -> tuple[str, int, bool] | Refusal:
    """(format, block size, are there zero points) that the matrices share."""
    kinds: set[str] = set()
    blocks: set[int] = set()
    zeros: set[bool] = set()
    for pieces in (p for matrix in slabs for p in matrix):
        for slab in pieces:
            for part in slab.seen.parts:
                dtype = part.source.dtype
                if part.quantized is None:
                    kinds.add("float")
                    continue
                if dtype not in FORMATS:
                    return Refusal("dtype", f"weights {part.source.name!r} are stored as {dtype}")
                kinds.add(FORMATS[dtype])
                zeros.add(part.quantized.zero is not None)
                if part.quantized.block and part.quantized.axis != slab.seen.axes[slab.into]:
                    along = f"weights {part.source.name!r} share scales along another axis than their input channels"
                    return Refusal("blocks", along)
            if slab.seen.quantized:
                blocks.add(block_of(slab))
    if len(kinds) != 1 or len(blocks) > 1 or len(zeros) > 1:
        return Refusal("blocks", f"the experts' matrices are stored in different ways: {', '.join(sorted(kinds))}")
    kind = kinds.pop()
    return kind, blocks.pop() if blocks else 0, zeros.pop() if zeros else False


def expert_sizes(routed: Routed, router: Router) -> Refusal | tuple[int, int]:
    """(hidden size, intermediate size); every expert must have the same."""
    found = set()
    for mlp in routed.experts:
        rows = len(mlp.gate.rows)
        if mlp.up is not None and len(mlp.up.rows) != rows:
            return Refusal("geometry", "gate and up projections of different widths")
        depths = {mlp.gate.linear.depth, *([] if mlp.up is None else [mlp.up.linear.depth])}
        found.add((mlp.down.width, rows, mlp.down.depth, *sorted(depths)))
        for layer in (mlp.down, mlp.gate.linear):
            if layer.expert is not None and layer.seen.shape[layer.expert] != router.experts - routed.zero:
                return Refusal(
                    "experts", f"weights of {layer.seen.shape[layer.expert]} experts, a router of {router.experts}"
                )
    if len(found) != 1 or len(next(iter(found))) != 4:
        return Refusal("geometry", "experts of different sizes")
    hidden, rows, depth, width = found.pop()
    if rows != depth or hidden != width:
        return Refusal("geometry", f"experts that map {width} channels to {rows} and {depth} to {hidden}")
    return hidden, rows


def clamp_settings(mlp: Mlp) -> dict[str, object]:
    return {
        "activation": mlp.activation,
        "activation_alpha": short(mlp.alpha),
        "gated": int(mlp.up is not None),
        "up_offset": short(mlp.offset),
        "clamp": mlp.clamp,
        "gate_limit": short(mlp.gate_limit),
        "up_limit": short(mlp.up_limit),
    }


def _form(slabs: Slabs) -> str:
    """How the matrices are made from the constants, in words that differ where they differ; long parts once each."""
    long: dict[object, int] = {}
    placed = []
    for pieces in slabs:
        for s in pieces:
            picks = [long.setdefault(p.picks, len(long)) for p in s.seen.parts]
            placed.append((len(pieces), s.order, long.setdefault(s.rows, len(long)), s.seen.axes, picks))
    return repr((placed, list(long)))


def short(number: float) -> float:
    """The shortest decimal of a float32 number."""
    return float(str(np.float32(number)))


def matrix_parameters(name: str, slabs: Slabs, kind: str, zero: bool, dtype: ir.DataType) -> dict[str, Parameter]:
    """The weight, and its scales and zero points, as parameters that are computed when they are read."""
    values = tuple(dict.fromkeys(v for pieces in slabs for s in pieces for v in s.values()))
    rows = sum(len(s.rows) for s in slabs[0])
    cols = slabs[0][0].seen.shape[slabs[0][0].into]
    stack, experts = slabs[0][0].expert, None
    if not name.startswith("shared_"):
        experts = len(slabs) if stack is None else slabs[0][0].seen.shape[stack]
    lead = () if experts is None else (experts,)
    form = _form(slabs)
    noise = cols**-0.5
    found: dict[str, Parameter] = {}

    def parameter(what: str, read: Reading, shape: tuple[int, ...], held: ir.DataType) -> None:
        def compute(arrays: Sequence[np.ndarray]) -> np.ndarray | None:
            whole = joined(slabs, dict(zip(values, arrays, strict=True)), read)
            alone = experts == 1 and stack is None
            return whole[None] if whole is not None and alone else whole

        found[f"{name}_{what}"] = Parameter(
            values,
            compute,
            noise=noise,
            shape=(*lead, *shape),
            form=f"{what} {form}",
            dtype=held,
            part=None if experts is None else Part(slabs, read, held),
        )

    if kind == "float":
        source = slabs[0][0].seen.parts[0].source
        natural = (
            (stack is not None or experts is None)
            and len(values) == 1
            and source.dtype == dtype
            and _is_natural(slabs[0][0])
        )
        parameter("weight", lambda s, a: s.numbers(a), (rows, cols), dtype)
        if natural:
            found[f"{name}_weight"] = Parameter((source,), None, noise=noise)
        return found
    held = ir.DataType.INT8 if kind == "int8" else ir.DataType.UINT8
    parameter("weight", lambda s, a: as_held(_stored(s.numbers(a), kind), kind), packed_shape((rows, cols), kind), held)
    block = block_of(slabs[0][0])
    scales = (rows, -(-cols // block) if block else 1)
    scale_type = slabs[0][0].seen.parts[0].quantized.scale.dtype  # type: ignore[union-attr]
    parameter("scale", lambda s, a: s.scales(a, "scale"), scales, scale_type or ir.DataType.FLOAT)
    if zero:
        kept = ZERO_POINTS[kind]

        def read_zero(slab: Slab, arrays: object) -> np.ndarray | None:
            zeros = slab.scales(arrays, "zero")  # type: ignore[arg-type]
            return None if zeros is None else zeros.astype(kept)

        parameter("zero_point", read_zero, scales, ir.DataType.INT8 if kept == np.int8 else ir.DataType.UINT8)
    return found


Reading = Callable[[Slab, Arrays], "np.ndarray | None"]


def _stored(array: np.ndarray, kind: str) -> np.ndarray:
    return array.astype(STORED[kind]) if array.dtype != STORED[kind] else array


def _is_natural(slab: Slab) -> bool:
    """Is the stored tensor the op's parameter as it stands?"""
    part = slab.seen.parts[0]
    rank = len(slab.seen.axes)
    return (
        len(slab.seen.parts) == 1
        and not part.picks
        and slab.seen.axes == tuple(range(rank))
        and len(static_dims(part.source) or []) == rank
        and slab.order == tuple(range(rank))
        and slab.rows == tuple(range(slab.seen.shape[slab.out]))
    )


@dataclass(frozen=True)
class Part:
    """Makes one expert's part of a parameter, reading that expert's constants only."""

    slabs: Slabs
    read: Reading
    dtype: ir.DataType

    def __call__(self, expert: int) -> np.ndarray:
        stacked = self.slabs[0][0].expert is not None
        pieces = tuple(_only(s, expert) for s in self.slabs[0]) if stacked else self.slabs[expert]
        arrays = {v: v.const_value.numpy() for s in pieces for v in s.values() if v.const_value is not None}
        made = joined((pieces,), arrays, self.read)
        if made is None:
            raise ValueError("constants that do not have the form that they had when the block was recognised")
        made = made[0] if pieces[0].expert is not None else made
        return np.ascontiguousarray(made.astype(self.dtype.numpy()) if made.dtype != self.dtype.numpy() else made)


def _only(slab: Slab, expert: int) -> Slab:
    assert slab.expert is not None
    return Slab(slab.seen.at(slab.expert, [expert]), slab.expert, slab.out, slab.into, slab.rows)


def vector(name: str, source: ir.Value, size: int) -> Parameter:
    """A bias."""
    return Parameter((source,), lambda a: a[0].reshape(-1).astype(np.float32) if a[0].size == size else None, form=name)


def shared_settings(shared: Shared, routed: Routed) -> str | None:
    """Why the shared expert can't be one with the routed ones, or None."""
    mine, theirs = shared.mlp.settings(), routed.experts[0].settings()
    if mine == theirs:
        return None
    return f"the shared expert has activation and clamp {mine}, the routed ones {theirs}: they would have to be equal"


def router_layer(reader: Reader, router: Router) -> Linear | None:
    """The router's linear layer, where the op can take it in: float weights, logits in float32 all the way."""
    layer = router.linear
    if layer is None or layer.seen.quantized or len(layer.seen.parts) != 1:
        return None
    start = layer.y if router.logits is None else router.logits
    return None if any(v.dtype in HALF for v in reader.trail(start)) else layer
