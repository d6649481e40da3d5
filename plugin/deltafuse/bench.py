"""How long a model's prompts and single tokens take, fused for each target and as it is; numbers are checked first."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .api import fuse, require_ort
from .assigned import model_calls
from .capture import Runner
from .compare import usual_limits
from .discovery import PluginError, get_library_path
from .errors import DeltaFuseError, OptionError
from .model_runs import DECODE, PROMPT, Steps, open_runner, relative_error, run_sequence, sequence
from .registry.targets import TARGETS
from .sample_inputs import Arrays, SampleInputs
from .session import assignment
from .signature import Signature, read_signature

#: A measurement goes on until it took so many seconds, or as many repeats as asked for.
MOST_SECONDS = 3.0
LEAST_REPEATS = 3

Progress = Callable[[str, int, int], None]


@dataclass
class Timing:
    """One phase of one variant: milliseconds a step, median and least, and the error that was checked before."""

    phase: str
    tokens: int
    past: int
    median_ms: float
    least_ms: float
    repeats: int
    error: float
    limit: float
    note: str = ""

    @property
    def tokens_per_second(self) -> float:
        return 1e3 * self.tokens / self.median_ms if self.median_ms else 0.0

    @property
    def same(self) -> bool:
        return self.error <= self.limit


@dataclass
class Variant:
    """One way to run the model. ``failed``: it was not timed, and why; ``notes``: lengths that it cannot run."""

    name: str
    target: str
    plugin: bool
    device: str = ""
    fused_nodes: int = 0
    nodes: dict[str, int] = field(default_factory=dict)  # by execution provider; "": refused by the plugin
    timings: list[Timing] = field(default_factory=list)
    failed: str = ""
    notes: list[str] = field(default_factory=list)


@dataclass
class BenchReport:
    """All variants; ``fused`` has the number of regions fused by op."""

    model: str
    device: str
    onnxruntime: str
    fused: dict[str, int] = field(default_factory=dict)
    variants: list[Variant] = field(default_factory=list)

    @property
    def same(self) -> bool:
        """Do all variants that ran give the same numbers?"""
        return all(timing.same for variant in self.variants for timing in variant.timings)

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        made = asdict(self) | {"same": self.same}
        for entry, variant in zip(made["variants"], self.variants, strict=True):
            for row, timing in zip(entry["timings"], variant.timings, strict=True):
                row |= {"tokens_per_second": timing.tokens_per_second, "same": timing.same}
        return made


def bench(
    model: str | os.PathLike[str],
    *,
    tokens: Sequence[int] = (64,),
    steps: int = 16,
    batch: int = 1,
    repeats: int = 20,
    targets: Sequence[str] | None = None,
    device: str = "auto",
    verify: bool = True,
    tolerance: float | None = None,
    seed: int = 0,
    dims: Mapping[str, int] | None = None,
    vocabulary: int | None = None,
    progress: Progress | None = None,
) -> BenchReport:
    """Time a model as it is, and fused for each target, with the plugin EP and in ONNX Runtime alone.

    A model that is fused already is timed with and without the plugin EP.

    Args:
        model: a path.
        tokens: lengths of prompts, where the model leaves that open.
        steps: steps after the longest prompt, for models that carry states.
        repeats: how often a prompt is run at most, after one run to warm up.
        targets: those to fuse for; all by default.
        device: as for ``deltafuse.session``.
        verify: prove the rewrites, as ``fuse`` does.
        tolerance: the largest relative L2 error of an output; by default by type, as ``verify``.
        batch, seed, dims, vocabulary: as for :class:`deltafuse.sample_inputs.SampleInputs`.

    Raises:
        OptionError: a target that there is not, or inputs that cannot be made.
        DeltaFuseError: the model cannot be loaded or fused, or nothing of it could be run.
    """
    version = require_ort("running models")
    unknown = [target for target in targets or () if target not in TARGETS]
    if unknown:
        raise OptionError(f"target {unknown[0]!r}: expected some of {', '.join(TARGETS)}")
    signature = read_signature(model)
    plans = _plans(signature, tokens, steps, batch, seed, dims, vocabulary)
    report = BenchReport(os.fspath(model), device, version)
    with tempfile.TemporaryDirectory(prefix="deltafuse.") as folder:
        ways = _ways(model, Path(folder), targets, verify, report, progress)
        truths: dict[str, tuple[str, list[Arrays]]] = {}
        for number, (variant, path) in enumerate(ways):
            if progress is not None:
                progress(f"run {variant.name}", number, len(ways))
            report.variants.append(variant)
            if not variant.failed:
                _run(variant, path, signature, plans, truths, device, repeats, tolerance)
    if not any(variant.timings for variant in report.variants):
        reasons = dict.fromkeys(why for v in report.variants for why in ([v.failed] if v.failed else v.notes))
        raise DeltaFuseError(f"{os.fspath(model)}: nothing could be run and timed: {'; '.join(reasons)}")
    return report


def _plans(
    signature: Signature,
    tokens: Sequence[int],
    steps: int,
    batch: int,
    seed: int,
    dims: Mapping[str, int] | None,
    vocabulary: int | None,
) -> list[Steps]:
    inputs = SampleInputs(signature, batch=batch, seed=seed, dims=dims, vocabulary=vocabulary)
    lengths = sorted(dict.fromkeys(tokens))
    lengths = lengths[-1:] if inputs.fixed else lengths
    last = len(lengths) - 1
    return [sequence(inputs, f"{n} tokens", n, steps if i == last else 0) for i, n in enumerate(lengths)]


def _ways(
    model: str | os.PathLike[str],
    folder: Path,
    targets: Sequence[str] | None,
    verify: bool,
    report: BenchReport,
    progress: Progress | None,
) -> list[tuple[Variant, Path]]:
    why_no_plugin = ""
    try:
        get_library_path()
    except PluginError as error:
        why_no_plugin = str(error)
    path = Path(model)
    if _is_fused(path):
        return [
            (Variant("as it is", "", False), path),
            (Variant("as it is, plugin", "", True, failed=why_no_plugin), path),
        ]
    ways = [(Variant("as it is", "", False), path)]
    for target in targets or TARGETS:
        made = folder / f"{target}.onnx"
        done = fuse(path, made, target=target, verify=verify, progress=progress)
        counts = {op: done.count(op) for op in {region.op for region in done.regions}}
        report.fused = {op: max(count, report.fused.get(op, 0)) for op, count in counts.items()} or report.fused
        name = "fused" if TARGETS[target].kernels_need_plugin else target
        if TARGETS[target].kernels_need_plugin:
            ways.append((Variant(f"{name}, plugin", target, True, failed=why_no_plugin), made))
        ways.append((Variant(f"{name}, no plugin", target, False), made))
    return ways


def _is_fused(path: Path) -> bool:
    class Named:
        _model_path = str(path)

    return any(True for _ in model_calls(Named()))


def _run(
    variant: Variant,
    path: Path,
    signature: Signature,
    plans: list[Steps],
    truths: dict[str, tuple[str, list[Arrays]]],
    device: str,
    repeats: int,
    tolerance: float | None,
) -> None:
    own = read_signature(path)
    try:
        runner = open_runner(path, signature, device, plugin=variant.plugin, graphs="auto")
    except DeltaFuseError as error:
        variant.failed = str(error)
        return
    with runner, warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        variant.device = f"{runner.device.name}:{runner.device.index}" if runner.device.name != "cpu" else "cpu"
        limits = usual_limits(signature, own, tolerance, on_gpu=runner.device.name != "cpu")
        placed = assignment(runner.session)
        variant.fused_nodes, variant.nodes = len(placed.fused), placed.counts()
        if variant.plugin and not placed.fused:
            variant.notes.append(placed.note or "no fused node runs on the plugin")
        for plan in plans:
            try:
                found = run_sequence(runner, plan)
            except OptionError:
                raise
            except DeltaFuseError as error:
                variant.notes.append(f"{plan.name}: cannot be run: {error}")
                continue
            _, truth = truths.setdefault(plan.name, (variant.name, found))
            errors = _errors(plan, found, truth)
            worst = {
                phase: max(values.items(), key=lambda item: item[1] / limits[item[0]] if limits[item[0]] else item[1])
                for phase, values in errors.items()
            }
            for timing in _time(runner, plan, repeats):
                name, timing.error = worst[timing.phase]
                timing.limit = limits[name]
                variant.timings.append(timing)
        variant.notes += [
            f"not replayed as a CUDA graph: {why}"
            for why in sorted(set(runner.not_captured.values()))[:2]
            if variant.device != "cpu"
        ]


def _errors(plan: Steps, found: list[Arrays], truth: list[Arrays]) -> dict[str, dict[str, float]]:
    """Phase -> output -> the worst error of its steps."""
    made: dict[str, dict[str, float]] = {}
    for step, one, two in zip(plan.steps, truth, found, strict=True):
        outputs = made.setdefault(step.phase, {})
        for name, value in one.items():
            outputs[name] = max(outputs.get(name, 0.0), relative_error(two[name], value))
    return made


def _time(runner: Runner, plan: Steps, repeats: int) -> list[Timing]:
    """Milliseconds of the prompt's first step, and of the single steps after it, from fresh states."""
    made = []
    first = plan.steps[0]
    if first.phase == PROMPT:
        taken: list[float] = []
        begin = time.perf_counter()
        while len(taken) < repeats and (len(taken) < LEAST_REPEATS or time.perf_counter() - begin < MOST_SECONDS):
            runner.reset(plan.states)
            taken.append(_step(runner, first.feeds))
        made.append(_timing(PROMPT, first.tokens, plan.past, taken))
    if any(step.phase == DECODE for step in plan.steps):
        taken = []
        for _ in range(2):  # the first one warms up
            runner.reset(plan.states)
            taken = [_step(runner, step.feeds) for step in plan.steps]
        ones = [ms for ms, step in zip(taken, plan.steps, strict=True) if step.phase == DECODE]
        before = sum(step.tokens for step in plan.steps if step.phase == PROMPT)
        made.append(_timing(DECODE, 1, plan.past + before, ones))
    return made


def _step(runner: Runner, feeds: Mapping[str, Any]) -> float:
    begin = time.perf_counter()
    runner.run(feeds, values=True)
    runner.synchronize()
    return 1e3 * (time.perf_counter() - begin)


def _timing(phase: str, tokens: int, past: int, taken: list[float]) -> Timing:
    return Timing(phase, tokens, past, statistics.median(taken), min(taken), len(taken), 0.0, 0.0)
