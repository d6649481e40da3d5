"""A candidate: this region of the graph is that op with these operands, parameters and results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from ..custom_ops.common.refusal import Refusal
from ..custom_ops.kda.spec import KdaConfig
from .region import Region


@dataclass(frozen=True)
class Piece:
    """A value of the graph and how to bring it to the op's layout: transpose, then reshape (ONNX Reshape rules)."""

    value: ir.Value
    permutation: tuple[int, ...] | None = None
    reshape: tuple[int, ...] | None = None

    @property
    def adds_time(self) -> bool:
        """Has the value no time axis: rows of the batch, one token each?"""
        return self.reshape is not None and self.reshape[1] == 1


@dataclass(frozen=True)
class Operand:
    """One run-time input of the op: one piece, or several concatenated along ``axis``."""

    pieces: tuple[Piece, ...]
    axis: int = -1


@dataclass(frozen=True)
class Parameter:
    """One parameter of the op, computed from constants of the graph.

    ``compute`` takes the constants' arrays in the order of ``sources`` and gives float32, or None when these values
    can't be this parameter (a decay rate that is not positive, say). ``positive``: the proof's perturbation of the
    sources keeps their sign.
    """

    sources: tuple[ir.Value, ...]
    compute: Callable[[Sequence[np.ndarray]], np.ndarray | None]
    positive: bool = False


@dataclass(frozen=True)
class Result:
    """One output of the op and the value, or values, of the graph that it stands for.

    The op's output is reshaped, then transposed, then, with several targets, split along ``axis`` into ``sizes``.
    """

    targets: tuple[ir.Value, ...]
    reshape: tuple[int, ...] | None = None
    permutation: tuple[int, ...] | None = None
    axis: int = -1
    sizes: tuple[int, ...] = ()


@dataclass
class Candidate:
    """A proposed rewrite of one KDA block."""

    name: str
    form: str
    config: KdaConfig
    operands: dict[str, Operand]
    parameters: dict[str, Parameter]
    results: dict[str, Result]
    region: Region
    one_token: bool = False
    absorbed: list[str] = field(default_factory=list)
    not_absorbed: list[Refusal] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    explained: frozenset[ir.Node] = frozenset()  # nodes of the steps that were recognised in closed form

    def input_values(self) -> list[ir.Value]:
        """The graph values that the rewrite reads, in a fixed order, each once."""
        found: dict[ir.Value, None] = {}
        for operand in self.operands.values():
            for piece in operand.pieces:
                found[piece.value] = None
        return list(found)

    def output_values(self) -> list[ir.Value]:
        """The graph values that the rewrite replaces, in a fixed order."""
        return [target for result in self.results.values() for target in result.targets]
