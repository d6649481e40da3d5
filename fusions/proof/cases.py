"""Inputs of a proof: the op's operands laid out as the region's own values."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import onnx_ir as ir

from ..candidate import Candidate, Operand, Piece
from ..dims import concrete
from .extract import proof_type

Arrays = dict[str, np.ndarray]
Shapes = Callable[[ir.Value], list[int]]


def raw_feeds(
    candidate: Candidate, operands: Arrays, env: Mapping[str, int], shapes: Mapping[ir.Value, list[int]] | None = None
) -> Arrays:
    """The region's input values for the op's operands: the candidate's layout undone.

    Args:
        shapes: the inputs' shapes where they are not the graph's own (a region cut down to fewer heads).

    Raises:
        UnknownDim: a piece whose shape is not known.
        ValueError: two operands that ask one value for different contents.
    """
    feeds: dict[str, np.ndarray] = {}

    def shape(value: ir.Value) -> list[int]:
        return shapes[value] if shapes is not None and value in shapes else concrete(value, env)

    for name, operand in candidate.operands.items():
        for piece, array in zip(operand.pieces, _parts(operand, operands[name], shape), strict=True):
            raw = np.ascontiguousarray(_undo(piece, array, shape), _numpy_type(piece.value))
            key = piece.value.name or ""
            if key in feeds and not np.array_equal(feeds[key], raw):
                raise ValueError(f"two operands read {key!r}")
            feeds[key] = raw
    return feeds


def _parts(operand: Operand, array: np.ndarray, shape: Shapes) -> list[np.ndarray]:
    if len(operand.pieces) == 1:
        return [array]
    layouts = [p.reshape for p in operand.pieces]
    if operand.reshape is not None and (dims := layouts[0]) is not None:
        array = array.reshape([array.shape[i] if d in (0, -1) else d for i, d in enumerate(dims[:-1])] + [-1])
    sizes = [
        shape(p.value)[operand.axis] if dims is None or operand.reshape is None else dims[operand.axis]
        for p, dims in zip(operand.pieces, layouts, strict=True)
    ]
    return np.split(array, np.cumsum(sizes)[:-1], axis=operand.axis)


def _undo(piece: Piece, array: np.ndarray, shape: Shapes) -> np.ndarray:
    if piece.each_row_of is not None:
        if not np.array_equal(array, np.broadcast_to(array[:1], array.shape)):
            raise ValueError("rows that differ where the graph has one for all")
        array = array[:1]
    if piece.reshape is None and piece.permutation is None:
        return array
    if piece.reshape is not None:
        raw = shape(piece.value)
        moved = raw if piece.permutation is None else [raw[i] for i in piece.permutation]
        array = array.reshape(moved)
    if piece.permutation is not None:
        array = np.transpose(array, np.argsort(piece.permutation))
    return array


def _numpy_type(value: ir.Value) -> np.dtype:
    """What the proof feeds a value with: float32 for every float type, else the value's own type."""
    return np.dtype(proof_type(value).numpy())


def value_names(values: list[ir.Value]) -> list[str]:
    return [v.name or "" for v in values]
