"""Sessions and sequences of steps for the commands that run models: a prompt, then tokens, the states carried along."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .api import require_ort
from .capture import Runner, capture
from .cuda_ep import CUDA_EP
from .errors import OptionError, OrtError
from .model_arg import refusal
from .sample_inputs import Arrays, SampleInputs
from .signature import Signature

PROMPT, DECODE = "prompt", "decode"


@dataclass(frozen=True)
class Step:
    """One step: which phase it belongs to, how many tokens it has, and its inputs without the states."""

    phase: str
    tokens: int
    feeds: Arrays


@dataclass(frozen=True)
class Steps:
    """Steps that follow one another, and the states before the first."""

    name: str
    steps: list[Step]
    states: Arrays = field(default_factory=dict)
    past: int = 0
    random_states: bool = False


def sequence(
    inputs: SampleInputs,
    name: str,
    tokens: int,
    decode: int,
    *,
    past: int = 0,
    random_states: bool = False,
    token_ids: Sequence[int] | None = None,
) -> Steps:
    """A prompt and the tokens after it, as far as the model has them.

    Args:
        inputs: what makes the inputs.
        name: what to call it.
        tokens: the prompt's; where a model takes another fixed number, it is cut into steps of that many.
        decode: steps after the prompt, for models that carry states.
        past: positions before the prompt, for models whose states have them.
        random_states: begin from random states, not from zeros.
        token_ids: the prompt's tokens; random ones by default.

    Raises:
        OptionError: inputs that cannot be made, with the reason.
    """
    carries = bool(inputs.signature.states)
    past = start = inputs.past(past)
    if token_ids is not None:
        tokens = len(token_ids)
    size = inputs.tokens(tokens)
    pieces = [size]
    if inputs.fixed and carries:
        pieces = [size] * max(1, -(-tokens // size))
    if inputs.fixed and token_ids is not None and len(token_ids) != size * len(pieces):
        raise OptionError(f"{len(token_ids)} tokens: the model takes {size} at a time")
    phases = [DECODE if size == 1 and carries else PROMPT] * len(pieces)
    if carries:
        pieces += [size if inputs.fixed else 1] * decode
        phases += [DECODE if size == 1 or not inputs.fixed else PROMPT] * decode
    steps = []
    states = inputs.states(past, random=random_states)
    loose = {key: value for key, value in states.items() if key not in inputs.signature.states}
    for number, (count, phase) in enumerate(zip(pieces, phases, strict=True)):
        ids = None
        if token_ids is not None and (number + 1) * size <= len(token_ids):
            ids = list(token_ids)[number * size : (number + 1) * size]
        feeds = inputs.step(count, past, ids, first=number == 0)
        steps.append(Step(phase, count, {**loose, **feeds}))
        past += count
    carried = {key: value for key, value in states.items() if key in inputs.signature.states}
    return Steps(name, steps, carried, start, random_states)


def run_sequence(runner: Runner, steps: Steps) -> list[Arrays]:
    """All outputs of each step, states included.

    Raises:
        DeltaFuseError: ONNX Runtime cannot run a step.
    """
    runner.reset(steps.states)
    made = []
    for step in steps.steps:
        outputs: Arrays = dict(runner.run(step.feeds))
        states = runner.state_arrays()
        outputs.update({output: states[given] for given, output in runner.states.items()})
        made.append(outputs)
    return made


def open_runner(
    model: str | os.PathLike[str],
    signature: Signature,
    device: str = "auto",
    *,
    plugin: bool = True,
    graphs: str = "never",
) -> Runner:
    """A runner over a session of :func:`deltafuse.session`, or of ONNX Runtime alone.

    Raises:
        DeltaFuseError: no such device, or ONNX Runtime does not take the model.
    """
    require_ort("running models")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # said by `doctor`, and in the result
        if plugin:
            return capture(
                os.fspath(model), states=signature.states, device=device, graphs=graphs, sess_options=_options()
            )
        return capture(stock_session(model, device), states=signature.states, graphs="never")


def stock_session(model: str | os.PathLike[str], device: str = "auto") -> Any:
    """A session without the plugin EP, on the CUDA EP where one is wanted and there, else on the CPU."""
    import onnxruntime as ort

    kind, _, number = device.partition(":")
    if kind not in ("auto", "cpu", "cuda") or (number and not number.isdigit()):
        raise OptionError(f"device {device!r}: expected 'auto', 'cpu', 'cuda' or 'cuda:N'")
    has_cuda = CUDA_EP in ort.get_available_providers()
    if kind == "cuda" and not has_cuda:
        raise OrtError(f"device {device!r}: this onnxruntime has no {CUDA_EP}")
    providers: list[Any] = ["CPUExecutionProvider"]
    if has_cuda and kind != "cpu":
        providers.insert(0, (CUDA_EP, {"device_id": number or "0"}))
    options = _options()
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    try:
        made = ort.InferenceSession(os.fspath(model), options, providers=providers, enable_fallback=0)
    except Exception as error:  # onnxruntime has no common base for its errors
        raise refusal(os.fspath(model), error, ort.__version__) from error
    made.disable_fallback()
    return made


def _options() -> Any:
    """Session options without log lines: a step that fails is part of a result, and told once."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 4
    return options


def relative_error(found: Any, truth: Any) -> float:
    """The L2 norm of the difference over that of the truth; infinite where only one is finite or the shapes differ.

    Of integers and booleans: the share of elements that differ.
    """
    if found.shape != truth.shape:
        return float("inf")
    if truth.dtype.kind in "iub":
        return float(np.mean(found != truth)) if truth.size else 0.0
    a, b = found.astype(np.float64), truth.astype(np.float64)
    if not np.isfinite(a).all() or not np.isfinite(b).all():
        return 0.0 if np.array_equal(a, b, equal_nan=True) else float("inf")
    if not a.size:
        return 0.0
    return float(np.linalg.norm(a - b) / max(float(np.linalg.norm(b)), 1e-12))


def summary(outputs: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Name, type, shape and, of numbers, least, greatest and mean of each output."""
    made = []
    for name, value in outputs.items():
        entry: dict[str, Any] = {"name": name, "dtype": str(value.dtype), "shape": list(value.shape)}
        if value.size:
            wide = value.astype(np.float64)
            entry |= {"min": float(wide.min()), "max": float(wide.max()), "mean": float(wide.mean())}
            entry["finite"] = bool(np.isfinite(wide).all())
        made.append(entry)
    return made
