"""Batch and tokens of a KDA candidate, and numbers for the symbols of its operands."""

from __future__ import annotations

from ..candidate import Candidate
from ..dims import symbol


def rows_and_tokens(candidate: Candidate) -> tuple[int | str | None, int | str | None]:
    """Batch and tokens of the block: numbers where frozen, symbols where dynamic, None where unnamed."""
    found: list[int | str | None] = [None, None]
    for name in ("beta", "g", "q", "v"):
        piece = candidate.operands[name].pieces[0] if name in candidate.operands else None
        if piece is None or piece.value.shape is None:
            continue
        dims = list(piece.value.shape)
        order = list(piece.permutation) if piece.permutation is not None else list(range(len(dims)))
        if piece.adds_time:
            found[1], order = 1, order[:1]
        for i, axis in enumerate(list(order)[:2]):
            dim = dims[axis]
            if isinstance(dim, int):
                found[i] = dim
            elif found[i] is None and dim.value is not None:
                found[i] = str(dim.value)
    return found[0], found[1]


def environment(candidate: Candidate, batch: int, tokens: int) -> dict[str, int]:
    """Numbers for the symbols of batch and tokens."""
    rows, length = rows_and_tokens(candidate)
    env: dict[str, int] = {}
    if isinstance(rows, str):
        env[rows] = batch
    if isinstance(length, str):
        env[length] = tokens
    for operand in candidate.operands.values():  # one size has several symbols where shapes were inferred
        for piece in operand.pieces:
            if piece.value.shape is None:
                continue
            order = list(piece.permutation) if piece.permutation is not None else list(range(len(piece.value.shape)))
            sizes = (
                (batch,) if piece.adds_time or operand is candidate.operands.get("initial_state") else (batch, tokens)
            )
            for axis, size in zip(order, sizes, strict=False):
                name = symbol(piece.value.shape[axis])
                if name is not None and name.isidentifier():
                    env.setdefault(name, size)
    if "conv_state" in candidate.operands:
        for piece in candidate.operands["conv_state"].pieces:
            columns = None if piece.value.shape is None else symbol(piece.value.shape[-1])
            if columns is not None and columns not in env:
                env[columns] = candidate.config.conv_state_width
    return env
