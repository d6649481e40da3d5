"""How the graph lays out a block's operands and its output, as the pieces that a candidate is made of."""

from __future__ import annotations

from dataclasses import replace

import onnx_ir as ir

from ..candidate import Operand, Piece, Result
from ..graph import GraphView, is_op, static_dims
from .block import Block
from .flow import channels_of
from .masks import Mask
from .parts import is_quantized


def rows_piece(value: ir.Value, width: int, *, label: str = "tokens") -> Piece | None:
    """A value of [B or 1, S, width], however many axes of one it has."""
    dims = value.shape
    if dims is None:
        return None
    rank = len(dims)
    if width > 1 and dims[-1] == 1:
        return _parts_piece(value, width, label)
    if width == 1 and (static_dims(value) or [0])[-1] != 1:
        # a number for each token, without a last axis
        if rank == 2:
            return Piece(value, axes=(_batch(dims[0]), label))
        return Piece(value, reshape=(1, -1), axes=(label,)) if rank == 1 else None
    if rank == 2:
        return Piece(value, reshape=(1, -1) if width == 1 else (1, -1, width), axes=(label, None))
    if rank == 3:
        return Piece(value, reshape=(0, 0) if width == 1 else None, axes=(_batch(dims[0]), label, None))
    if rank == 4 and (dims[1] == 1 or dims[2] == 1):
        axes = (_batch(dims[0]), None, label, None) if dims[1] == 1 else (_batch(dims[0]), label, None, None)
        return Piece(value, reshape=(0, -1) if width == 1 else (0, -1, width), axes=axes)
    return None


def _parts_piece(value: ir.Value, width: int, label: str) -> Piece | None:
    """The same of a part of complex numbers, which has an axis of size one behind its channels."""
    dims = list(value.shape or ())[:-1]
    one = [i for i in range(1, len(dims) - 1) if dims[i] == 1]
    if len(dims) == 2:
        return Piece(value, reshape=(1, -1, width), axes=(label, None, None))
    if len(dims) == 3:
        return Piece(value, reshape=(0, 0, width), axes=(_batch(dims[0]), label, None, None))
    if len(dims) != 4 or not one:
        return None
    axes = [_batch(dims[0]), label, label, None, None]
    axes[one[0]] = None
    return Piece(value, reshape=(0, -1, width), axes=tuple(axes))


def _batch(dim: int | ir.SymbolicDim) -> str | None:
    return None if dim == 1 else "batch"


def query_operand(block: Block) -> Operand | None:
    """Queries, each head nope | rope: one layer's, or one layer's for each of the two."""
    if block.q_rope is None:
        piece = _query_piece(block.q, block.heads, block.nope + block.rope)
        return None if piece is None else Operand((piece,))
    pieces = [_query_piece(q, block.heads, w) for q, w in ((block.q, block.nope), (block.q_rope, block.rope))]
    if any(p is None for p in pieces):
        return None
    parts = tuple(
        replace(p, reshape=(1, -1, block.heads, w) if len(p.axes) == 2 else (0, 0, block.heads, w))
        for p, w in zip(pieces, (block.nope, block.rope), strict=True)
        if p is not None
    )
    return Operand(parts, reshape=(0, 0, block.heads * (block.nope + block.rope)))


def _query_piece(q: ir.Value, heads: int, width: int) -> Piece | None:
    dims, channels = static_dims(q), heads * width
    if dims is None:
        return None
    if len(dims) == 3 and dims[2] in (None, channels):
        return Piece(q, axes=("batch", "tokens", None))
    if len(dims) == 2 and dims[1] in (None, channels):
        return Piece(q, reshape=(1, -1, channels), axes=("tokens", None))
    if len(dims) == 4 and dims[2] == heads and dims[3] == width:
        return Piece(q, reshape=(0, 0, channels), axes=("batch", "tokens", None, None))
    if len(dims) == 4 and dims[1] == heads and dims[3] in (None, width):
        return Piece(q, (0, 2, 1, 3), (0, 0, channels), axes=("batch", None, "tokens", None))
    return None


def quantized_weight(block: Block) -> Operand | None:
    """kv_b's weight as the graph dequantizes it, [R, H * (Dn + Dv)]; None where it is stored as numbers."""
    if not any(is_quantized(w) for w, _ in block.weights):
        return None
    heads, widths = block.heads, (block.nope, block.value)
    turned = [((1, 0) if flip else None) for _, flip in block.weights]
    if len(block.weights) == 1:
        return Operand((Piece(block.weights[0][0], turned[0]),))
    pieces = tuple(
        Piece(weight, turn, (0, heads, width))
        for (weight, _), turn, width in zip(block.weights, turned, widths, strict=True)
    )
    return Operand(pieces, reshape=(0, heads * sum(widths)))


def wide_piece(value: ir.Value, width: int) -> Piece | None:
    """A latent or a rotary key [B, S, width], with or without an axis of size one; rows are one sequence."""
    dims = static_dims(value)
    if dims is None or dims[-1] != width:
        return None
    if len(dims) == 3:
        return Piece(value, axes=("batch", "tokens", None))
    if len(dims) == 2:
        return Piece(value, reshape=(1, -1, width), axes=("tokens", None))
    if len(dims) == 4 and dims[1] == 1:
        return Piece(value, reshape=(0, -1, width), axes=("batch", None, "tokens", None))
    if len(dims) == 4 and dims[2] == 1:
        return Piece(value, reshape=(0, -1, width), axes=("batch", "tokens", None, None))
    return None


def packed_value(view: GraphView, block: Block) -> ir.Value | None:
    """The value that latent and rotary key are cut from, one behind the other."""
    if block.k_rope is None:
        return None
    a, b = block.latent.raw.producer(), block.k_rope.producer()
    if a is None or b is None or not a.inputs or a.inputs[0] is not b.inputs[0] or a.inputs[0] is None:
        return None
    if channels_of(a.inputs[0]) != block.rank + block.rope:
        return None
    if a is b and is_op(a, "Split") and list(a.outputs)[:2] == [block.latent.raw, block.k_rope]:
        return a.inputs[0]
    if is_op(a, "Slice") and is_op(b, "Slice"):
        starts = [view.ints(n.inputs[1]) for n in (a, b)]
        if starts == [[0], [block.rank]]:
            return a.inputs[0]
    return None


def mask_piece(block: Block, mask: Mask) -> Piece | None:
    value = mask.operand
    assert value is not None
    dims = value.shape
    if dims is None:
        return None
    keys = "tokens" if block.cache is None else block.cache.keys
    if mask.keys_only:
        return Piece(value, reshape=(0, 1, 1, -1), axes=(_batch(dims[0]), keys)) if len(dims) == 2 else None
    if len(dims) == 2:
        if dims[0] == 1:
            return Piece(value, reshape=(1, 1, 1, -1), axes=(None, keys))
        return None
    if len(dims) != 4:
        return None
    rows = None if dims[4 - block.core.queries_at] == 1 else "tokens"
    if block.core.queries_at == 3:
        return Piece(value, (0, 2, 1, 3), axes=(_batch(dims[0]), rows, None, keys))
    return Piece(value, axes=(_batch(dims[0]), None, rows, keys))


def heads_piece(value: ir.Value, heads: int) -> Piece | None:
    dims = static_dims(value)
    if dims is None:
        return None
    if len(dims) == 3 and dims[2] == heads:
        return Piece(value, axes=("batch", "tokens", None))
    if len(dims) == 2 and dims[1] == heads:
        return Piece(value, reshape=(1, -1, heads), axes=("tokens", None))
    if len(dims) == 4 and dims[2] == heads and dims[3] == 1:
        return Piece(value, reshape=(0, 0, heads), axes=("batch", "tokens", None, None))
    return None


def output_result(block: Block) -> Result | None:
    x, layout = block.end.x, block.end.layout
    if layout == "BSC":
        dims = static_dims(x)
        return Result((x,)) if dims is not None and dims[2] in (None, block.heads * block.value) else None
    if layout == "NC":
        return Result((x,), reshape=(-1, block.heads * block.value))
    heads = (0, 0, block.heads, block.value)
    if layout == "BSHD":
        return Result((x,), reshape=heads)
    if layout == "BHSD":
        return Result((x,), reshape=heads, permutation=(0, 2, 1, 3))
    return None
