"""Run a candidate's region beside its replacement and compare.

The region is cut out of the graph as a model of its own, in float32, and run by ONNX Runtime on the CPU with all its
optimisations off. Its replacement is built by the same code that the rewrite splices in. Constants that the candidate
reads as the op's parameters are perturbed first, on both sides, so that a layer whose bias happens to be zero proves as
much as any other. One proof serves all regions of the same structure. Where ops differ, the candidate's ``op`` answers.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import numpy as np
import onnx_ir as ir

from ...custom_ops.common.refusal import Refusal
from ..candidate import Candidate, Result
from ..dims import UnknownDim
from ..graph import GraphView
from ..op import LONGEST_PROBE, TOLERANCE, Case
from ..parameters import ProofImpossible
from ..replacement import replacement
from ..result import ProofReport
from .analytic import not_analytic
from .extract import Extract, NotExtractable, proof_type
from .problem import OutOfTime, Problem, ProofBudget, first_line, session
from .structure import structure_hash

SEED = 20261130
_INDEX_ARITHMETIC = frozenset(
    "Add Div Equal Greater GreaterOrEqual Less LessOrEqual Max Min Mod Mul Range Sub Where".split()
)
#: A bound on positions past 2^31 means the end.
_TO_THE_END = (1 << 31) - 1


def _error(found: np.ndarray, want: np.ndarray) -> float:
    """Relative L2 norm; infinite for a NaN or another shape."""
    if found.shape != want.shape or not np.all(np.isfinite(found)):
        return float("inf")
    difference = float(np.linalg.norm(found.astype(np.float64) - want.astype(np.float64)))
    size = float(np.linalg.norm(want.astype(np.float64)))
    return difference / size if size > 0 else (0.0 if difference == 0 else float("inf"))


def _worst(found: list[np.ndarray], want: list[np.ndarray]) -> float:
    return max(_error(f, w) for f, w in zip(found, want, strict=True))


class Prover:
    """Proofs over one graph, one for each distinct structure."""

    def __init__(self, view: GraphView, opset: int, budget: ProofBudget | None = None, seed: int = SEED) -> None:
        self.view, self.opset, self.seed = view, opset, seed
        self.budget = budget or ProofBudget()
        self._proofs: dict[str, ProofReport] = {}
        self._screens: dict[str, float | Refusal] = {}

    # --- screening: is this reading right at all, and what is the scale? ------------------------------------------

    def screen(self, core: Candidate) -> float | Refusal:
        """The output scale that makes the candidate fit the region, or why it does not fit.

        ``core`` has no norm and no output gate, and scale 1: the region's output must be a multiple of the op's.
        """
        try:
            extract = self._extract(core)
            key = structure_hash(self.view, core, extract)
            if key not in self._screens:
                self._screens[key] = self._screen(core, extract)
            return self._screens[key]
        except OutOfTime as error:
            return Refusal("budget", str(error))
        except (NotExtractable, UnknownDim, ProofImpossible, ValueError) as error:
            return Refusal("proof", f"the region can't be run on its own: {error}")

    def _screen(self, core: Candidate, extract: Extract) -> float | Refusal:
        op = core.op
        case = op.screening_case(core)
        env = op.environment(core, case.sizes)
        problem = Problem(self.view, self.budget, core, extract, self.seed)
        core = problem.candidate
        operands = op.draw(core, case, self.seed)
        try:
            outputs = dict(zip(extract.outputs, problem.run(problem.raw(operands, env), env), strict=True))
        except (ProofImpossible, UnknownDim):
            raise
        except Exception as error:
            return Refusal("region-run", f"ONNX Runtime does not run the region at {_shown(case)}: {first_line(error)}")
        truth = op.reference(core, {**operands, **problem.parameters})
        scale = 1.0
        for name, result in core.results.items():
            want = _lay_out(truth[name], result)
            for i, target in enumerate(result.targets):
                found = outputs[target].astype(np.float64)
                if found.shape != want[i].shape:
                    return Refusal(
                        "shape", f"{name}: the region gives {list(found.shape)}, the op {list(want[i].shape)}"
                    )
                if name == op.scaled_output:
                    size = float(np.vdot(want[i], want[i]))
                    scale = float(np.vdot(want[i], found)) / size if size > 0 else 0.0
                    distance = _error(scale * want[i], found)
                else:
                    distance = _error(want[i], found)
                if not distance < 1e-3:
                    return Refusal("mismatch", f"{name} differs from the op's by {distance:.1e} (relative L2)")
        return scale

    # --- the proof ----------------------------------------------------------------------------------------------------

    def prove(self, candidate: Candidate) -> ProofReport:
        """Prove or refute one candidate; a structure that was seen before is answered from memory."""
        start = time.perf_counter()
        try:
            extract = self._extract(candidate)
            key = structure_hash(self.view, candidate, extract)
            known = self._proofs.get(key)
            if known is not None:
                return replace(known, reused=True, seconds=time.perf_counter() - start)
            report = self._prove(candidate, extract, key)
            report.structure = key
        except (NotExtractable, UnknownDim, ProofImpossible, ValueError) as error:
            return ProofReport(
                False,
                seed=self.seed,
                tolerance=TOLERANCE,
                reason=str(error) or type(error).__name__,
                out_of_time=isinstance(error, OutOfTime),
            )
        report.seconds = time.perf_counter() - start
        self._proofs[key] = report
        return report

    def _extract(self, candidate: Candidate) -> Extract:
        inputs = sorted(candidate.input_values(), key=self._place)
        extract = Extract(self.view, inputs, candidate.output_values())
        piecewise = not_analytic(self.view, candidate, extract)
        if piecewise is not None:
            raise NotExtractable(piecewise)
        return extract

    def _place(self, value: ir.Value) -> tuple[int, str]:
        producer = value.producer()
        return (-1 if producer is None else self.view.position[producer], value.name or "")

    def _prove(self, candidate: Candidate, extract: Extract, key: str) -> ProofReport:
        report = ProofReport(True, error=0.0, tolerance=TOLERANCE, seed=self.seed)
        problem = Problem(self.view, self.budget, candidate, extract, self.seed)
        report.heads = list(problem.heads)
        candidate, op = problem.candidate, candidate.op
        try:
            body = self._replacement_session(candidate, problem)
        except Exception as error:  # ORT raises types of its own
            raise ProofImpossible(f"ONNX Runtime does not load the replacement: {first_line(error)}") from error
        skip = candidate.explained if op.explains_positions else frozenset()
        plan = op.plan(candidate, lambda: position_bounds(self.view, extract, skip))
        plan += op.unforeseen(candidate, np.random.default_rng(int(key, 16)))
        compared = 0
        for i, case in enumerate(plan):
            env = op.environment(candidate, case.sizes)
            seed = self.seed + i
            operands = op.draw(candidate, case, seed)
            entry: dict = {"case": case.name, **case.sizes, "seed": seed}
            report.cases.append(entry)
            feeds = problem.raw(operands, env)
            try:
                want = problem.run(feeds, env)
            except ProofImpossible:
                raise
            except Exception as error:
                entry["original"] = f"fails: {first_line(error)}"
                if case.required:
                    report.proved, report.reason = False, f"the region does not run: {first_line(error)}"
                    return report
                continue
            try:
                found = body.run(None, feeds)
            except Exception as error:
                report.proved = False
                report.reason = f"the replacement does not run at {_shown(case)}: {first_line(error)}"
                return report
            if not _finite(want):
                entry["original"] = "gives values that are not finite"
                exact = problem.exact(feeds, env) if _finite(found) else None
                if exact is not None and _finite(exact):
                    want = exact
                elif not _finite(found) or op.overflows(case):
                    continue
            errors = [_error(f, w) for f, w in zip(found, want, strict=True)]
            entry["errors"] = errors
            compared += 1
            worst = max(errors)
            limit = op.limit(candidate, case)
            if not worst <= limit:
                # the original may have lost its digits in float32: float64 is the truth
                exact = problem.exact(feeds, env)
                if exact is not None:
                    entry["original"] = f"differs from its own float64 result by {_worst(want, exact):.1e}"
                    entry["errors_float64"] = [_error(f, w) for f, w in zip(found, exact, strict=True)]
                    worst = max(entry["errors_float64"])
            report.error = max(report.error, worst * TOLERANCE / limit)
            if not worst <= limit:
                report.proved = False
                place = int(np.argmax(entry.get("errors_float64", errors)))
                how = f"relative error {worst:.2e}, tolerance {limit:.1e}"
                if found[place].shape != want[place].shape:
                    how = f"shape {list(found[place].shape)} instead of {list(want[place].shape)}"
                report.reason = f"case {case.name!r} at {_shown(case)}: {how}, in {extract.outputs[place].name!r}"
                return report
        if compared < 3:
            report.proved = False
            report.reason = f"only {compared} cases could be compared"
        return report

    def _replacement_session(self, candidate: Candidate, problem: Problem) -> Any:
        inputs = candidate.input_values()
        bind = {
            v: ir.Value(
                name=v.name,
                type=ir.TensorType(proof_type(v)),
                shape=v.shape
                if problem.cut is None or v not in problem.cut.shapes
                else ir.Shape(problem.cut.shapes[v]),
            )
            for v in inputs
        }
        used = {v.name for v in inputs}

        def names(hint: str) -> str:
            while hint in used:
                hint += "_"
            used.add(hint)
            return hint

        built = replacement(candidate, bind, problem.parameters, names, "fused", self.opset, float32=True)
        outputs = [built.outputs[t] for t in candidate.output_values()]
        for target, value in zip(candidate.output_values(), outputs, strict=True):
            value.type = ir.TensorType(proof_type(target))
            value.shape = None
        graph = ir.Graph(
            list(bind.values()),
            outputs,
            nodes=built.nodes,
            initializers=built.initializers,
            opset_imports={"": self.opset},
            name="replacement",
        )
        model = ir.Model(graph, ir_version=10)
        assert built.function is not None
        candidate.op.attach(model, built.function)
        return session(ir.to_proto(model))


def position_bounds(view: GraphView, extract: Extract, skip: Collection[ir.Node] = ()) -> list[int]:
    """The bounds on positions that the region names: in its slices along axes of unknown length, and in arithmetic of
    integers; sorted, each as often as it is named.

    Raises:
        NotExtractable: a bound that no probe can pass.
    """
    found: list[int] = []
    for node in extract.nodes:
        if node in skip:
            continue
        if node.op_type == "Slice":
            values = [] if _is_fixed_axis(view, node) else list(node.inputs[1:3])
        elif node.op_type in _INDEX_ARITHMETIC:
            values = list(node.inputs)
        else:
            continue
        for value in values:
            if value is not None and view.is_integer(value):
                found += (abs(i) for i in view.ints(value) or ())
    bounds = sorted(i for i in found if 1 < i < _TO_THE_END)
    if bounds and bounds[-1] > LONGEST_PROBE:
        raise NotExtractable(f"it names position {bounds[-1]}, and proofs look at {LONGEST_PROBE} tokens at most")
    return bounds


def _is_fixed_axis(view: GraphView, node: ir.Node) -> bool:
    """Does the slice run along an axis of known length?"""
    axes = view.ints(node.inputs[3]) if len(node.inputs) > 3 and node.inputs[3] is not None else [0]
    shape = None if node.inputs[0] is None else node.inputs[0].shape
    return axes is not None and shape is not None and all(isinstance(shape[a], int) for a in axes)


def _finite(arrays: list[np.ndarray]) -> bool:
    return all(bool(np.all(np.isfinite(a))) for a in arrays)


def _shown(case: Case) -> str:
    """The case's sizes for people."""
    return ", ".join(f"{size} {name}" if name == "tokens" else f"{name} {size}" for name, size in case.sizes.items())


def _lay_out(array: np.ndarray, result: Result) -> list[np.ndarray]:
    """The op's output as its targets have it."""
    if result.reshape is not None:
        dims = [array.shape[i] if d == 0 else d for i, d in enumerate(result.reshape)]
        array = array.reshape(dims)
    if result.permutation is not None:
        array = np.transpose(array, result.permutation)
    if len(result.targets) == 1:
        return [array]
    return np.split(array, np.cumsum(result.sizes)[:-1], axis=result.axis)


def prove(view: GraphView, candidate: Candidate, opset: int, budget: ProofBudget | None = None) -> ProofReport:
    """Prove one candidate on its own; see :class:`Prover` for many over one graph."""
    return Prover(view, opset, budget).prove(candidate)
