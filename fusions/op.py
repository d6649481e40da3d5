"""What the pipeline needs to know of an op: one :class:`FusedOp` for each, in the op's recogniser folder.

Recognisers propose candidates of an op; everything behind them (screening, proof, rewrite) is the same for all ops and
asks the candidate's ``op`` where ops differ. ``kda/op.py`` is the first one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from .dims import UnknownDim, evaluate, symbol

if TYPE_CHECKING:
    from .candidate import Candidate, Piece
    from .graph import GraphView
    from .proof.extract import Extract
    from .proof.shrink import Shrunk

Arrays = dict[str, np.ndarray]
#: Sizes by name, as an op's operands have them: "batch", "tokens", "past", ...
Sizes = Mapping[str, int]

FLOAT = ir.DataType.FLOAT
_ELEMENTS = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)

#: Worst relative L2 error between region and replacement, both in float32.
TOLERANCE = 1e-4
#: The longest sequence that a proof runs; a region that names a bound on positions past it is refused.
LONGEST_PROBE = 20_000


@dataclass(frozen=True)
class Case:
    """One run of a proof.

    Attributes:
        name: what is drawn (one of the op's hostile cases).
        sizes: the number of every size that operands have, frozen ones too.
        required: the original must run on it; a probe may fail, and the report says so.
    """

    name: str
    sizes: Sizes = field(default_factory=dict)
    required: bool = False


class FusedOp(ABC):
    """One op: its calls, and how to prove that a region is it.

    Attributes:
        key: the op's key in ``registry/ops.py``; reports and ``--require`` count by it.
        explains_positions: a candidate's explained nodes are in closed form at every length: bounds on positions that
            they name need no probe.
        size_ops: what may compute sizes outside of explained nodes, beside sums and products. What a quotient or a
            comparison of sizes moves about, it may move otherwise at lengths that no probe reaches. None: anything may.
        scaled_output: the output that a screened core may give as a multiple of the op's, or "" where none is measured.
    """

    key: str = ""
    scaled_output: str = ""
    explains_positions: bool = False
    size_ops: frozenset[str] | None = None

    # --- the call ---------------------------------------------------------------------------------------------------

    def kind_of(self, name: str) -> str:
        """The type of an operand, parameter or result: "T", "TS" (the states' type), "float32", or "own": as it is in
        the graph."""
        return "T"

    def element_type(self, candidate: Candidate) -> ir.DataType:
        """T of the call: the type that all operands of kind T have, or float32 when they differ."""
        found = {
            piece.value.dtype
            for name, operand in candidate.operands.items()
            if self.kind_of(name) == "T"
            for piece in operand.pieces
            if piece.value.dtype is not None
        }
        only = next(iter(found)) if len(found) == 1 else FLOAT
        return only if only in _ELEMENTS else FLOAT

    def state_type(self, candidate: Candidate) -> ir.DataType:
        """TS of the call: the type of the states that come in, or go out, in the graph; float32 without one."""
        values = [p.value for n, o in candidate.operands.items() if self.kind_of(n) == "TS" for p in o.pieces]
        values += [t for n, r in candidate.results.items() if self.kind_of(n) == "TS" for t in r.targets]
        for value in values:
            if value.dtype in (ir.DataType.FLOAT16, ir.DataType.BFLOAT16):
                return value.dtype
        return FLOAT

    @abstractmethod
    def make_call(
        self,
        candidate: Candidate,
        inputs: Mapping[str, ir.Value],
        opset: int,
        dtype: ir.DataType,
        state_dtype: ir.DataType,
        name: str,
    ) -> tuple[ir.Function, ir.Node, dict[str, ir.Value]]:
        """The function, a node that calls it, and the node's outputs by name (those that the call asks for).

        Args:
            inputs: a value for each operand and parameter of the candidate.
            opset: the default domain's, which the function body is written for.
            dtype, state_dtype: T and TS.
            name: the node's name.
        """

    @abstractmethod
    def attach(self, model: ir.Model, function: ir.Function) -> None:
        """Put a function into the model, once, and import its domain."""

    # --- what a proof draws -------------------------------------------------------------------------------------------

    @abstractmethod
    def plan(self, candidate: Candidate, bounds: Callable[[], list[int]]) -> list[Case]:
        """The runs of a proof.

        Args:
            bounds: gives the bounds on positions that the region names, sorted; probes go past them. It raises
                NotExtractable where no probe can.
        """

    def unforeseen(self, candidate: Candidate, rng: np.random.Generator) -> list[Case]:
        """More runs, of sizes that depend on the structure itself: ``rng`` is seeded by its hash. A graph that differs
        but at the sizes of :meth:`plan` (a slice from ``(B - 1) * (B - 2) * (B - 3)`` on) cannot foresee them."""
        return []

    @abstractmethod
    def draw(self, candidate: Candidate, case: Case, seed: int) -> Arrays:
        """The op's operands for one case, float32 where they are floats; parameters need not be among them."""

    @abstractmethod
    def reference(self, candidate: Candidate, inputs: Arrays) -> Arrays:
        """The op's outputs in float64, by name."""

    def constants(self, view: GraphView, candidate: Candidate, seed: int) -> Mapping[ir.Value, np.ndarray]:
        """What stands for the parameters' sources in a proof, on both sides."""
        from .parameters import Perturbed

        return Perturbed(view, candidate, seed)

    def extra_memory(self, candidate: Candidate) -> int:
        """Bytes that a run of the region holds beside what its static shapes tell."""
        return 0

    def screening_case(self, candidate: Candidate) -> Case:
        """The one run that a reading is screened with."""
        return self.plan(candidate, lambda: [])[0]

    def limit(self, candidate: Candidate, case: Case) -> float:
        """The relative L2 error that a case may have; more than TOLERANCE only where float32 itself is uncertain."""
        return TOLERANCE

    def overflows(self, case: Case) -> bool:
        """May the original overflow here, in float64 too, without being wrong?"""
        return False

    def allows(self, view: GraphView, candidate: Candidate, node: ir.Node) -> bool:
        """Is a node that is not analytic harmless for a reason that the op knows?"""
        return False

    def shrink(
        self, view: GraphView, candidate: Candidate, extract: Extract, arrays: Mapping[ir.Value, np.ndarray]
    ) -> Shrunk:
        """Cut a region that is too large to run down to a part that proves the whole.

        Raises:
            HeadsMix: it can't be shown that the part proves the whole.
        """
        from .proof.spread import HeadsMix

        raise HeadsMix(f"no cut is known for {self.key}")

    # --- sizes --------------------------------------------------------------------------------------------------------

    def axes_of(self, candidate: Candidate, name: str, piece: Piece) -> tuple[str | None, ...]:
        """What the axes of a piece's value are: names of sizes, sums of them ("past + tokens"), or None."""
        return piece.axes

    def _labelled(self, candidate: Candidate) -> list[tuple[str, int | ir.SymbolicDim]]:
        return [
            (label, dim)
            for name, operand in candidate.operands.items()
            for piece in operand.pieces
            if piece.value.shape is not None
            for label, dim in zip(self.axes_of(candidate, name, piece), piece.value.shape, strict=False)
            if label is not None
        ]

    def sizes(self, candidate: Candidate) -> dict[str, int | str | None]:
        """The operands' sizes: numbers where frozen, symbols where dynamic, None where unnamed."""
        found: dict[str, int | str | None] = {}
        for label, dim in self._labelled(candidate):
            if not label.isidentifier():
                continue
            known = found.setdefault(label, None)
            if isinstance(dim, int):
                found[label] = dim
            elif known is None:
                found[label] = symbol(dim)
        return found

    def environment(self, candidate: Candidate, sizes: Sizes) -> dict[str, int]:
        """Numbers for the symbols of the graph's dims."""
        env: dict[str, int] = {}
        for label, dim in self._labelled(candidate):
            name = symbol(dim)
            if name is not None and name.isidentifier():
                try:
                    env.setdefault(name, evaluate(label, sizes))
                except UnknownDim:
                    continue
        return env

    # --- the report ---------------------------------------------------------------------------------------------------

    def describe(self, candidate: Candidate) -> dict[str, Any]:
        """The configuration as the report shows it."""
        from dataclasses import asdict

        return asdict(candidate.config)
