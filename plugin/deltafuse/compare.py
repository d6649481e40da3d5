"""Two models on the same inputs: do they give the same, step for step, with their own states carried along?

States that only one of them has, or that have another type there (``fuse --latent-cache`` makes caches of latents of
caches of keys and values, ``--quantize cache=int8`` makes 8-bit ones) begin empty and are not compared: what they hold
shows in the outputs of later steps.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from .capture import Runner
from .custom_ops.mla.spec import CACHE_LIMITS
from .errors import DeltaFuseError, OptionError
from .model_runs import Steps, open_runner, relative_error, run_sequence, sequence
from .sample_inputs import Arrays, SampleInputs
from .signature import Port, Signature, read_signature

#: Largest relative L2 error by the type that the models compute in: that of a proof, and for the half types what two
#: right orders of rounding differ by over a few layers.
TOLERANCES = {"float32": 1e-4, "float64": 1e-4, "float16": 1e-2, "bfloat16": 3e-2}
#: On a GPU kernels round to TF32 inside: each op's own tolerance there is 1e-3 (``spec.py``), and a model has several.
TOLERANCES_GPU = {**TOLERANCES, "float32": 5e-3}

#: Types of states that are 8-bit caches, as the op calls them.
_EIGHT_BITS = {"int8": "int8", "float8_e4m3fn": "float8"}
#: Codes of two models that both hold 8 bits: a few fall on the other side of a rounding.
CODES_LIMIT = 1e-2

Progress = Callable[[str, int, int], None]


@dataclass
class OutputCheck:
    """One output in one phase: the worst of its steps. ``rows_off`` of the ``rows`` along its last axis in all steps,
    one for each token as a rule, are beyond the limit by themselves; states are not counted by rows."""

    phase: str
    output: str
    steps: int
    error: float
    limit: float
    max_abs: float
    state: bool = False
    rows: int = 0
    rows_off: int = 0

    @property
    def same(self) -> bool:
        return self.error <= self.limit


@dataclass
class CaseCheck:
    """One sequence. ``failed``: "first", "second" or "both" could not run it; ``reason`` has ONNX Runtime's words."""

    name: str
    tokens: list[int]
    past: int
    outputs: list[OutputCheck] = field(default_factory=list)
    failed: str = ""
    reason: str = ""

    @property
    def status(self) -> str:
        """ "same", "differs", "repaired" (only the first fails), "broken" (only the second fails) or "not run"."""
        if self.failed:
            return {"first": "repaired", "second": "broken", "both": "not run"}[self.failed]
        return "same" if all(check.same for check in self.outputs) else "differs"


@dataclass
class Comparison:
    """All cases of two models. ``own_states``: inputs that are states of the first or of the second model alone;
    ``notes``: what a difference may come of."""

    first: str
    second: str
    seed: int
    cases: list[CaseCheck] = field(default_factory=list)
    own_states: tuple[list[str], list[str]] = field(default_factory=lambda: ([], []))
    notes: list[str] = field(default_factory=list)

    @property
    def same(self) -> bool:
        """Is there nothing that the second model does worse, and at least one case that both ran?"""
        states = [case.status for case in self.cases]
        return "same" in states and not {"differs", "broken"} & set(states)

    @property
    def error(self) -> float:
        """The worst error of all."""
        return max((check.error for case in self.cases for check in case.outputs), default=float("nan"))

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        made = asdict(self) | {"same": self.same, "error": self.error}
        for entry, case in zip(made["cases"], self.cases, strict=True):
            entry["status"] = case.status
            for row, check in zip(entry["outputs"], case.outputs, strict=True):
                row["same"] = check.same
        return made


def compare(
    first: str | os.PathLike[str],
    second: str | os.PathLike[str],
    *,
    tokens: Sequence[int] = (16,),
    steps: int = 4,
    past: int = 8,
    batch: int = 1,
    samples: int = 1,
    seed: int = 0,
    tolerance: float | None = None,
    dims: Mapping[str, int] | None = None,
    vocabulary: int | None = None,
    given: Mapping[str, Any] | None = None,
    device: str = "cpu",
    plugin: bool = True,
    progress: Progress | None = None,
) -> Comparison:
    """Run two models on the same inputs, from zero states and from random ones, a prompt and then token by token.

    Args:
        first: the model that is right.
        second: the one to check. Inputs and outputs have the same names, except for states: where each model has some
            of its own, all states begin empty, and those that both have are compared.
        tokens: lengths of prompts, where the models leave that open.
        steps: steps after the prompt, where they carry states.
        past: positions in random states, where their number is open.
        batch, dims, vocabulary, given: as for :class:`deltafuse.sample_inputs.SampleInputs`.
        samples: how many times, each with other random numbers.
        tolerance: the largest relative L2 error; by default by type (:data:`TOLERANCES`), and more where one of the
            models alone holds caches in 8 bits (:func:`cache_allowance`).
        device: as for ``deltafuse.session``.
        plugin: use the plugin EP for fused nodes.

    Raises:
        OptionError: the models' inputs or outputs are not the same, or inputs cannot be made.
        DeltaFuseError: a model that cannot be loaded.
    """
    signature, other = read_signature(first), read_signature(second)
    own_states = _check_alike(signature, other)
    for name in given or {}:
        if name in own_states[0] + own_states[1]:
            raise OptionError(f"input {name!r} is a state of one of the models alone: such states begin empty")
    plans = _plans(signature, tokens, steps, past, batch, samples, seed, dims, vocabulary, given)
    plans_of_other = plans
    if own_states[0]:
        plans = [plan for plan in plans if not plan.random_states]
        symbols = other.symbols()
        known = {name: size for name, size in (dims or {}).items() if name in symbols}
        shared = {name: array for name, array in (given or {}).items() if name in other.inputs}
        inputs = SampleInputs(other, batch=batch, dims=known, vocabulary=vocabulary, given=shared)
        plans_of_other = [replace(plan, states=_paired(inputs, plan.past)) for plan in plans]
    done = Comparison(os.fspath(first), os.fspath(second), seed, own_states=own_states)
    results: list[list[list[Arrays] | DeltaFuseError]] = []
    limits: dict[str, float] = {}
    both = ((first, signature, plans), (second, other, plans_of_other))
    for number, (model, own, own_plans) in enumerate(both):
        with open_runner(model, own, device, plugin=plugin) as runner:
            found: list[list[Arrays] | DeltaFuseError] = []
            limits = usual_limits(signature, other, tolerance, on_gpu=runner.device.name != "cpu")
            for index, plan in enumerate(own_plans):
                if progress is not None:
                    progress(f"{'first' if number == 0 else 'second'} model: {plan.name}", index, len(plans))
                found.append(_try(runner, plan))
            results.append(found)
    for plan, one, two in zip(plans, *results, strict=True):
        done.cases.append(_case(plan, one, two, signature, own_states[0], limits))
    if cache_allowance(signature, other) and (signature.chooses or other.chooses):
        done.notes += _other_choices(done)
    if tolerance is None and not done.same and other.quantized and not signature.quantized:
        done.notes.append(_ROUNDED)
    return done


_ROUNDED = (
    "weights of the second model are quantized, those of the first are not: limits are those of unquantized ones. "
    "--tolerance says how much rounding may change; the report of `fuse` has the error of each weight"
)


def _other_choices(done: Comparison) -> list[str]:
    """What to think of outputs that differ where a cache is rounded in front of routers."""
    counted = [check for case in done.cases for check in case.outputs if check.rows]
    if all(check.same for check in counted):
        return []
    off, rows = sum(c.rows_off for c in counted), sum(c.rows for c in counted)
    return [
        f"{off} of {rows} rows of outputs (a token each) are beyond the limit by themselves. One of the models holds "
        "caches in 8 bits, and they choose (experts, most likely): where two scores are close, rounding chooses the "
        "other, and that token differs by more than any limit for rounding; random weights make many such scores. A "
        "wrong cache shows in nearly all rows. To tell for sure, verify a model that was fused without --quantize "
        "cache, and measure this one on real inputs"
    ]


def _paired(inputs: SampleInputs, past: int) -> Arrays:
    """A model's empty states, of those that an output continues."""
    return {name: array for name, array in inputs.states(past).items() if name in inputs.signature.states}


def _plans(
    signature: Signature,
    tokens: Sequence[int],
    steps: int,
    past: int,
    batch: int,
    samples: int,
    seed: int,
    dims: Mapping[str, int] | None,
    vocabulary: int | None,
    given: Mapping[str, Any] | None,
) -> list[Steps]:
    plans = []
    if given:
        inputs = SampleInputs(signature, batch=batch, seed=seed, dims=dims, vocabulary=vocabulary, given=given)
        plans.append(sequence(inputs, "given inputs", inputs.tokens(tokens[0]), steps, past=past))
        return plans
    lengths = list(dict.fromkeys(tokens))
    for sample in range(samples):
        inputs = SampleInputs(signature, batch=batch, seed=seed + sample, dims=dims, vocabulary=vocabulary)
        again = f", sample {sample + 1}" if samples > 1 else ""
        for length in lengths[:1] if inputs.fixed else lengths:
            size = inputs.tokens(length)
            what = f"{size} tokens at a time" if inputs.fixed and signature.states else f"{size} tokens"
            if not signature.of("state"):
                plans.append(sequence(inputs, f"{what}{again}", length, steps))
                continue
            plans.append(sequence(inputs, f"zero states, {what}{again}", length, steps))
            plans.append(
                sequence(inputs, f"random states, {what}{again}", length, steps, past=past, random_states=True)
            )
    return plans


def _try(runner: Runner, plan: Steps) -> list[Arrays] | DeltaFuseError:
    try:
        return run_sequence(runner, plan)
    except OptionError:
        raise
    except DeltaFuseError as error:
        return error


def _case(
    plan: Steps,
    one: list[Arrays] | DeltaFuseError,
    two: list[Arrays] | DeltaFuseError,
    signature: Signature,
    own: Sequence[str],
    limits: Mapping[str, float],
) -> CaseCheck:
    case = CaseCheck(plan.name, [step.tokens for step in plan.steps], plan.past)
    if isinstance(one, DeltaFuseError) or isinstance(two, DeltaFuseError):
        bad = [isinstance(one, DeltaFuseError), isinstance(two, DeltaFuseError)]
        case.failed = "both" if all(bad) else "first" if bad[0] else "second"
        case.reason = str(one if bad[0] else two)
        return case
    states = set(signature.states.values())
    left_out = {signature.states[name] for name in own}
    worst: dict[tuple[str, str], OutputCheck] = {}
    for step, truth, found in zip(plan.steps, one, two, strict=True):
        for name, value in truth.items():
            if name in left_out or name not in found:
                continue
            check = worst.setdefault(
                (step.phase, name), OutputCheck(step.phase, name, 0, 0.0, limits[name], 0.0, name in states)
            )
            check.steps += 1
            check.error = max(check.error, relative_error(*map(_as_numbers, (found[name], value))))
            if not check.state:
                off, rows = _rows_off(found[name], value, check.limit)
                check.rows, check.rows_off = check.rows + rows, check.rows_off + off
            if value.size and found[name].shape == value.shape:
                check.max_abs = max(check.max_abs, _max_abs(found[name], value))
    case.outputs = list(worst.values())
    return case


def _rows_off(found: Any, truth: Any, limit: float) -> tuple[int, int]:
    """How many rows along the last axis are beyond the limit, and how many there are; none of what has no rows."""
    if found.shape != truth.shape or truth.ndim < 2 or truth.dtype.kind in "iub":
        return 0, 0
    difference = np.linalg.norm(found.astype(np.float64) - truth.astype(np.float64), axis=-1)
    sizes = np.linalg.norm(truth.astype(np.float64), axis=-1)
    return int(np.sum(~(difference <= limit * np.maximum(sizes, 1e-12)))), difference.size


def _as_numbers(value: Any) -> Any:
    """Codes of an int8 cache count by how far they are apart, not by how many differ."""
    return value.astype(np.float32) if value.dtype == np.int8 else value


def _max_abs(found: Any, truth: Any) -> float:
    with np.errstate(invalid="ignore"):
        return float(np.abs(found.astype(np.float64) - truth.astype(np.float64)).max())


def usual_limits(
    first: Signature, second: Signature, tolerance: float | None, *, on_gpu: bool = False
) -> dict[str, float]:
    """The largest error of each output: the tolerance that is given, else by the types that both models compute in."""
    limits = {}
    usually = TOLERANCES_GPU if on_gpu else TOLERANCES
    allowance = cache_allowance(first, second)
    for name, port in first.outputs.items():
        kinds = {str(port.dtype), first.half, second.half} & set(usually)
        usual = max((usually[kind] for kind in kinds), default=0.0) + allowance
        if port.dtype.name in _EIGHT_BITS:
            usual = max(usual, CODES_LIMIT)
        limits[name] = tolerance if tolerance is not None else usual
    return limits


def _check_alike(first: Signature, second: Signature) -> tuple[list[str], list[str]]:
    """The inputs that are states of one model alone, the first's and the second's: both have some, or none has.

    Raises:
        OptionError: other inputs, outputs or types differ.
    """
    own = (
        [name for name, port in first.inputs.items() if name in first.states and not _has(second, port)],
        [name for name, port in second.inputs.items() if name in second.states and not _has(first, port)],
    )
    if not own[0] or not own[1]:
        own = ([], [])
    fed = [{signature.states[name] for name in names} for signature, names in zip((first, second), own, strict=True)]
    for what in ("inputs", "outputs"):
        left_out = own if what == "inputs" else fed
        one, two = (
            {name: port for name, port in getattr(signature, what).items() if name not in names}
            for signature, names in zip((first, second), left_out, strict=True)
        )
        if set(one) != set(two):
            only = [f"only the first has {', '.join(sorted(set(one) - set(two)))}"] if set(one) - set(two) else []
            only += [f"only the second has {', '.join(sorted(set(two) - set(one)))}"] if set(two) - set(one) else []
            raise OptionError(f"the models' {what} differ: {'; '.join(only)}")
        for name, port in one.items():
            if port.dtype != two[name].dtype:
                raise OptionError(f"the models' {what} differ: {name} is a {port.dtype} and a {two[name].dtype}")
    return own


def _has(signature: Signature, port: Port) -> bool:
    """Has it an input of this name and type?"""
    other = signature.inputs.get(port.name)
    return other is not None and other.dtype == port.dtype


def cache_allowance(first: Signature, second: Signature) -> float:
    """What outputs may differ by because one of the models holds caches in 8 bits that the other does not."""
    held = [{signature.inputs[name].dtype.name for name in signature.states} for signature in (first, second)]
    kinds = [_EIGHT_BITS[name] for name in held[0] ^ held[1] if name in _EIGHT_BITS]
    return max((CACHE_LIMITS[kind] for kind in kinds), default=0.0)
