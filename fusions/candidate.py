"""A candidate: this region of the graph is that op with these operands, parameters and results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir

from ..custom_ops.common.refusal import Refusal
from .op import FusedOp
from .region import Region


@dataclass(frozen=True)
class Piece:
    """A value of the graph and how to bring it to the op's layout: transpose, then reshape (ONNX Reshape rules).

    ``axes`` names the sizes of the value's own axes for proofs: "batch", "tokens", "past + tokens", None for others.
    An op may know them without being told (:meth:`FusedOp.axes_of`). ``each_row_of``: one entry for all, spread to as
    many as that value's first axis has.
    """

    value: ir.Value
    permutation: tuple[int, ...] | None = None
    reshape: tuple[int, ...] | None = None
    axes: tuple[str | None, ...] = ()
    each_row_of: ir.Value | None = None

    @property
    def adds_time(self) -> bool:
        """Has the value no time axis: rows of the batch, one token each?"""
        return self.reshape is not None and self.reshape[1] == 1


@dataclass(frozen=True)
class Operand:
    """One run-time input of the op: one piece, or several concatenated along ``axis``, then reshaped.

    ``reshape`` joins the axes behind the first two, which keep their sizes; all pieces are reshaped to theirs before.
    """

    pieces: tuple[Piece, ...]
    axis: int = -1
    reshape: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Parameter:
    """One parameter of the op, computed from constants of the graph.

    Attributes:
        sources: the constants.
        compute: takes their arrays in this order and gives the parameter's, or None when these values can't be this
            parameter (a decay rate that is not positive, say). None in its place: the one source is the parameter as
            it stands, and the rewrite reads the graph's own value, copying nothing.
        positive: the proof's perturbation of the sources keeps their sign.
        noise: how strongly the proof perturbs the sources: the noise's standard deviation.
        shape: the parameter's shape. With it the rewrite computes the array only when the model is saved or run, which
            large weights need; without it at once.
        form: tells ``compute`` functions apart that read the same sources; part of the structure.
        dtype: the parameter's element type in the rewrite, where it is not what the op says of it.
        part: makes one part along the first axis, so that a stack of experts need not be in memory as a whole.
    """

    sources: tuple[ir.Value, ...]
    compute: Callable[[Sequence[np.ndarray]], np.ndarray | None] | None
    positive: bool = False
    noise: float = 0.3
    shape: tuple[int, ...] | None = None
    form: str = ""
    dtype: ir.DataType | None = None
    part: Callable[[int], np.ndarray] | None = None


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
    """A proposed rewrite of one block: a call of ``op`` with ``config``, the op's own configuration type."""

    op: FusedOp
    name: str
    form: str
    config: Any
    operands: dict[str, Operand]
    parameters: dict[str, Parameter]
    results: dict[str, Result]
    region: Region
    one_token: bool = False
    absorbed: list[str] = field(default_factory=list)
    not_absorbed: list[Refusal] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    explained: frozenset[ir.Node] = frozenset()  # nodes of the steps that were recognised in closed form
    held: tuple[str, ...] = ()  # names of values of the graph that are what the op's cache holds

    def input_values(self) -> list[ir.Value]:
        """The graph values that the rewrite reads, in a fixed order, each once."""
        found: dict[ir.Value, None] = {}
        for operand in self.operands.values():
            for piece in operand.pieces:
                found[piece.value] = None
                if piece.each_row_of is not None:
                    found[piece.each_row_of] = None
        return list(found)

    def output_values(self) -> list[ir.Value]:
        """The graph values that the rewrite replaces, in a fixed order."""
        return [target for result in self.results.values() for target in result.targets]
