"""One proof's region as something to run: whole or cut down to a part, in float32 or float64."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from ..candidate import Candidate
from ..graph import GraphView
from ..parameters import ProofImpossible, parameter_arrays
from .cases import Arrays, raw_feeds, value_names
from .extract import Cut, Extract
from .spread import HeadsMix

#: Regions that would hold more than this are cut down to a part where that can be shown to be sound.
CUT_ABOVE = 256 << 20


@dataclass(frozen=True)
class ProofBudget:
    """What one structure's proof may take: bytes (estimated beforehand) and seconds (checked between runs)."""

    memory: int = 4 << 30
    seconds: float = 60.0


class OutOfTime(ProofImpossible):
    """The proof's time budget ran out."""


class Problem:
    """A region to run, whole or cut down to a part, and the candidate and parameters that belong to it."""

    def __init__(
        self,
        view: GraphView,
        budget: ProofBudget,
        candidate: Candidate,
        extract: Extract,
        seed: int,
    ) -> None:
        self.extract, self.budget = extract, budget
        self.deadline = time.perf_counter() + budget.seconds
        self.arrays = candidate.op.constants(view, candidate, seed)
        self.candidate = candidate
        self.cut: Cut | None = None
        self.heads: tuple[int, ...] = ()
        need = memory_need(extract, candidate) + candidate.op.extra_memory(candidate)
        if need <= min(budget.memory, CUT_ABOVE) or not self._cut(view, budget, need):
            self.parameters = parameter_arrays(view, candidate, self.arrays)
        try:
            self._session = session(extract.model(self.arrays, cut=self.cut))
        except Exception as error:  # ORT raises types of its own: whatever it is, the region can't be run
            raise ProofImpossible(f"ONNX Runtime does not load it: {first_line(error)}") from error
        self.outputs = value_names(extract.outputs)
        self.inputs = {i.name for i in self._session.get_inputs()}

    def _cut(self, view: GraphView, budget: ProofBudget, need: int) -> bool:
        """Cut the region down where the op knows how; False where it stays whole and fits the budget."""
        try:
            shrunk = self.candidate.op.shrink(view, self.candidate, self.extract, self.arrays)
        except HeadsMix as reason:
            if need > budget.memory:
                raise ProofImpossible(
                    f"to run the region takes about {need / 2**30:.1f} GiB, the proof's budget is "
                    f"{budget.memory / 2**30:.1f} GiB, and it can't be cut down ({reason}); raise the budget "
                    "with --proof-memory, or fuse unproved with --no-verify"
                ) from None
            return False
        self.cut, self.heads = shrunk.cut, shrunk.kept
        self.parameters = shrunk.parameters(self.candidate, self.arrays)
        self.candidate = shrunk.candidate
        left = int(need * shrunk.share)
        if left > budget.memory:
            raise ProofImpossible(
                f"a part of the region still takes about {left / 2**30:.1f} GiB; the proof's budget is "
                f"{budget.memory / 2**30:.1f} GiB; raise it with --proof-memory, or fuse unproved "
                "with --no-verify"
            )
        return True

    def raw(self, operands: Arrays, env: Mapping[str, int]) -> Arrays:
        shapes: dict[ir.Value, list[int]] = {}
        for value, dims in self.cut.shapes.items() if self.cut is not None else ():
            static = [d for d in dims if isinstance(d, int)]
            if len(static) == len(dims):
                shapes[value] = static
        return raw_feeds(self.candidate, operands, env, shapes)

    def run(self, feeds: Arrays, env: Mapping[str, int]) -> list[np.ndarray]:
        """The region's results in float32.

        Raises:
            OutOfTime: the budget ran out during the run.
        """
        import onnxruntime as ort

        feeds = {**self.extract.shape_feeds(env), **feeds}
        options = ort.RunOptions()
        left = self.deadline - time.perf_counter()
        timer = threading.Timer(max(left, 0.0), lambda: setattr(options, "terminate", True))
        timer.daemon = True
        timer.start()
        try:
            found: list[np.ndarray] = self._session.run(
                self.outputs, {k: v for k, v in feeds.items() if k in self.inputs}, options
            )
            return found
        except Exception as error:
            if options.terminate:
                raise OutOfTime(
                    f"the proof took longer than its budget of {self.budget.seconds:g} s; raise it with "
                    "--proof-seconds, or fuse unproved with --no-verify"
                ) from error
            raise
        finally:
            timer.cancel()

    def exact(self, feeds: Arrays, env: Mapping[str, int]) -> list[np.ndarray] | None:
        """The region's results in float64, by onnx's reference implementation; None when it can't run it."""
        from onnx.reference import ReferenceEvaluator

        feeds = {**self.extract.shape_feeds(env), **feeds}
        wide = {k: v.astype(np.float64) if v.dtype.kind == "f" else v for k, v in feeds.items()}
        try:
            evaluator = ReferenceEvaluator(self.extract.model(self.arrays, onnx.TensorProto.DOUBLE, self.cut))
            known = set(evaluator.input_names)
            with np.errstate(all="ignore"):
                return [np.asarray(r) for r in evaluator.run(None, {k: v for k, v in wide.items() if k in known})]
        except Exception:  # an op or a type that the reference evaluator lacks: float32 decides
            return None


def memory_need(extract: Extract, candidate: Candidate) -> int:
    """An estimate of the bytes that a run of the region holds at once, where its shapes are static."""
    largest = 0
    for node in extract.nodes:
        for value in node.outputs:
            if value.shape is not None and value.shape.is_static():
                largest = max(largest, 4 * int(np.prod(value.shape.numpy() or (1,))))
    weights = sum(4 * v.const_value.size for v in extract.constants if v.const_value is not None)
    # float32 working copies of the largest tensor: operands and result of one node, and what later nodes wait for
    return 6 * largest + weights


def first_line(error: Exception) -> str:
    """The telling part of an error, on one line."""
    return " ".join(str(error).split())[:240]


def session(model: onnx.ModelProto) -> Any:
    """An ONNX Runtime session on the CPU, with the model run as it is written."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    options.enable_mem_pattern = False
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
