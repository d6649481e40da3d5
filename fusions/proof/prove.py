"""Run a candidate's region beside its replacement and compare.

The region is cut out of the graph as a model of its own, in float32, and run by ONNX Runtime on the CPU with all its
optimisations off. Its replacement is built by the same code that the rewrite splices in. Constants that the candidate
reads as the op's parameters are perturbed first, on both sides, so that a layer whose bias happens to be zero proves as
much as any other. One proof serves all regions of the same structure.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import onnx_ir as ir

from ...custom_ops.common.refusal import Refusal
from ...custom_ops.kda.reference import reference
from ..candidate import Candidate
from ..graph import GraphView
from ..replacement import replacement
from ..result import ProofReport
from .analytic import not_analytic
from .cases import HOSTILE, Arrays, draw, environment, rows_and_tokens
from .dims import UnknownDim
from .extract import Extract, NotExtractable
from .problem import OutOfTime, Problem, ProofBudget, ProofImpossible, first_line, session
from .structure import structure_hash

#: Worst relative L2 error between region and replacement, both in float32; ``HARD`` for the nearly collinear case.
TOLERANCE = 1e-4
HARD_FACTOR = 5.0
#: Token counts tried on a dynamic graph. A chunked export is right up to 64 tokens only: longer ones are probed.
TOKENS = (5, 1, 17, 64)
PROBES = (65, 130)
SEED = 20261130
_INDEX_ARITHMETIC = frozenset(
    "Add Div Equal Greater GreaterOrEqual Less LessOrEqual Max Min Mod Mul Range Sub Where".split()
)
#: The longest sequence that a proof runs; a bound on positions past it is refused, one past 2^31 means the end.
LONGEST_PROBE = 20_000
_TO_THE_END = (1 << 31) - 1
MOST_ROWS = 64
#: Cases whose decays a chunked original may overflow with, in float64 too: exponents of the other sign, masked later.
OVERFLOWING = ("gate-unbounded", "gate-near-bound", "wide", "extreme-last")


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
        rows, tokens = _sizes(core, TOKENS[0])
        env = environment(core, rows, tokens)
        problem = self._problem(core, extract)
        core = problem.candidate
        operands = draw(core.config, rows, tokens, self.seed, "normal")
        try:
            outputs = dict(zip(extract.outputs, problem.run(problem.raw(operands, env), env), strict=True))
        except ProofImpossible:
            raise
        except Exception as error:
            return Refusal(
                "region-run", f"ONNX Runtime does not run the region at {tokens} tokens: {first_line(error)}"
            )
        truth = reference(core.config, {**operands, **problem.parameters})
        scale = 1.0
        for name, result in core.results.items():
            want = _lay_out(truth[name], result)
            for i, target in enumerate(result.targets):
                found = outputs[target].astype(np.float64)
                if found.shape != want[i].shape:
                    return Refusal(
                        "shape", f"{name}: the region gives {list(found.shape)}, the op {list(want[i].shape)}"
                    )
                if name == "o":
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
            report = self._prove(candidate, extract, start)
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

    def _problem(self, candidate: Candidate, extract: Extract) -> Problem:
        arrays, parameters = self.perturbed(candidate)
        return Problem(self.view, self.budget, candidate, extract, arrays, parameters)

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

    def _prove(self, candidate: Candidate, extract: Extract, start: float) -> ProofReport:
        report = ProofReport(True, error=0.0, tolerance=TOLERANCE, seed=self.seed)
        _, length = rows_and_tokens(candidate)
        problem = self._problem(candidate, extract)
        report.heads = list(problem.heads)
        candidate = problem.candidate
        body = self._replacement_session(candidate, problem)
        plan = self._plan(candidate, extract)
        compared = 0
        for i, (case, rows, tokens, probe) in enumerate(plan):
            env = environment(candidate, rows, tokens)
            seed = self.seed + i
            operands = draw(candidate.config, rows, tokens, seed, case)
            entry: dict = {"case": case, "batch": rows, "tokens": tokens, "seed": seed}
            report.cases.append(entry)
            feeds = problem.raw(operands, env)
            try:
                want = problem.run(feeds, env)
            except ProofImpossible:
                raise
            except Exception as error:
                entry["original"] = f"fails: {first_line(error)}"
                if not probe and length is not None and not isinstance(length, str):
                    report.proved, report.reason = False, f"the region does not run: {first_line(error)}"
                    return report
                continue
            found = body.run(None, feeds)
            if not _finite(want):
                entry["original"] = "gives values that are not finite"
                exact = problem.exact(feeds, env) if _finite(found) else None
                if exact is not None and _finite(exact):
                    want = exact
                elif not _finite(found) or case in OVERFLOWING:
                    continue
            errors = [_error(f, w) for f, w in zip(found, want, strict=True)]
            entry["errors"] = errors
            compared += 1
            worst = max(errors)
            limit = TOLERANCE * (HARD_FACTOR if case == "collinear-slow" else 1.0)
            if not worst <= limit:
                # the original may have lost its digits in float32: float64 is the truth
                exact = problem.exact(feeds, env)
                if exact is not None:
                    entry["original"] = f"differs from its own float64 result by {_worst(want, exact):.1e}"
                    entry["errors_float64"] = [_error(f, w) for f, w in zip(found, exact, strict=True)]
                    worst = max(entry["errors_float64"])
            report.error = max(report.error, worst / (HARD_FACTOR if case == "collinear-slow" else 1.0))
            if not worst <= limit:
                report.proved = False
                report.reason = (
                    f"case {case!r} at {tokens} tokens: relative error {worst:.2e}, tolerance {limit:.1e}, in "
                    f"{extract.outputs[int(np.argmax(entry.get('errors_float64', errors)))].name!r}"
                )
                return report
        if compared < 3:
            report.proved = False
            report.reason = f"only {compared} cases could be compared"
        return report

    def _plan(self, candidate: Candidate, extract: Extract) -> list[tuple[str, int, int, bool]]:
        """(case, batch, tokens, is a probe): each hostile case once, over the token counts; then probes beyond 64."""
        rows, length = rows_and_tokens(candidate)
        batches = [rows] if isinstance(rows, int) else [1, 2]
        tokens = [length] if isinstance(length, int) else list(TOKENS)
        plan = [(case, batches[i % len(batches)], tokens[i % len(tokens)], False) for i, case in enumerate(HOSTILE)]
        plan = [
            p for p in plan if not (p[0] in ("zero-state", "full-state") and not candidate.config.has_initial_state)
        ]
        if isinstance(length, int) and isinstance(rows, int):
            return plan
        bounds = position_bounds(self.view, extract)
        if not isinstance(length, int):
            # past the largest bound, and past all of them one behind the other
            past = {
                t + 3 for t in (bounds[-1:] and (bounds[-1], sum(bounds))) if max(PROBES) < t + 3 <= LONGEST_PROBE + 3
            }
            plan += [("normal", batches[0], t, True) for t in (*PROBES, *sorted(past))]
        if not isinstance(rows, int):
            past_rows = {3, *(b + 3 for b in bounds if b <= MOST_ROWS)}
            plan += [("normal", b, tokens[0], True) for b in sorted(past_rows)[-2:]]
        return plan

    def _replacement_session(self, candidate: Candidate, problem: Problem) -> Any:
        inputs = candidate.input_values()
        bind = {
            v: ir.Value(
                name=v.name,
                type=ir.TensorType(ir.DataType.FLOAT),
                shape=v.shape if problem.cut is None else ir.Shape(problem.cut.shapes[v]),
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
        for value in outputs:
            value.type = ir.TensorType(ir.DataType.FLOAT)
            value.shape = None
        graph = ir.Graph(
            list(bind.values()),
            outputs,
            nodes=built.nodes,
            initializers=built.initializers,
            opset_imports={"": self.opset, "deltafuse": 1},
            name="replacement",
        )
        model = ir.Model(graph, ir_version=10)
        assert built.function is not None
        model.functions[built.function.identifier()] = built.function
        return session(ir.to_proto(model))

    # --- parameters -------------------------------------------------------------------------------------------------

    def perturbed(self, candidate: Candidate) -> tuple[dict[ir.Value, np.ndarray], Arrays]:
        """The parameters' constants, perturbed, and the op's parameters that follow from them."""
        rng = np.random.default_rng(self.seed)
        positive = {s for p in candidate.parameters.values() if p.positive for s in p.sources}
        arrays: dict[ir.Value, np.ndarray] = {}
        for name, parameter in candidate.parameters.items():
            for source in parameter.sources:
                if source in arrays:
                    continue
                array = self.view.array(source)
                if array is None:
                    raise ProofImpossible(f"the constant {source.name!r} behind {name} can't be read")
                arrays[source] = _perturb(array.astype(np.float32), rng, source in positive)
        return arrays, self.parameters(candidate, arrays)

    def parameters(self, candidate: Candidate, arrays: Mapping[ir.Value, np.ndarray] | None = None) -> Arrays:
        """The op's parameters, float32, from the graph's constants (or from ``arrays`` in their place).

        Raises:
            ProofImpossible: a constant that can't be the parameter it should be.
        """
        found: Arrays = {}
        for name, parameter in candidate.parameters.items():
            sources = [
                arrays[s] if arrays is not None and s in arrays else self.view.array(s) for s in parameter.sources
            ]
            array = parameter.compute([s for s in sources if s is not None])
            if array is None:
                raise ProofImpossible(f"the constants behind {name} do not have the form that {name} needs")
            found[name] = np.ascontiguousarray(array, np.float32)
        return found


def position_bounds(view: GraphView, extract: Extract) -> list[int]:
    """The bounds on positions that the region names: in its slices along axes of unknown length, and in arithmetic of
    integers; sorted, each as often as it is named.

    Raises:
        NotExtractable: a bound that no probe can pass.
    """
    found: list[int] = []
    for node in extract.nodes:
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


def _perturb(array: np.ndarray, rng: np.random.Generator, positive: bool) -> np.ndarray:
    """Another constant of the same kind: a rate keeps its sign and its equal entries, the rest gets noise."""
    if positive:
        # entries that are equal (one rate, repeated over a head's channels) must stay equal
        values, inverse = np.unique(array, return_inverse=True)
        factors = np.exp(rng.uniform(-0.4, 0.4, values.shape))
        return (values * factors)[inverse].reshape(array.shape).astype(np.float32)
    return (array + 0.3 * rng.standard_normal(array.shape)).astype(np.float32)


def _sizes(candidate: Candidate, tokens: int) -> tuple[int, int]:
    rows, length = rows_and_tokens(candidate)
    return (rows if isinstance(rows, int) else 1, length if isinstance(length, int) else tokens)


def _lay_out(array: np.ndarray, result) -> list[np.ndarray]:  # type: ignore[no-untyped-def]
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
