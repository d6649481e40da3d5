"""One run of a model, for a look at it: its outputs, what ran where, and how long it took."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .errors import OutputError
from .model_runs import open_runner, run_sequence, sequence, summary
from .model_save import check_target
from .sample_inputs import Arrays, SampleInputs
from .session import assignment
from .signature import Signature, read_signature


def run_model(
    model: str | os.PathLike[str],
    *,
    token_ids: Sequence[int] | None = None,
    given: Mapping[str, Any] | None = None,
    device: str = "auto",
    plugin: bool = True,
    batch: int = 1,
    seed: int = 0,
    dims: Mapping[str, int] | None = None,
    vocabulary: int | None = None,
) -> tuple[Arrays, dict[str, Any]]:
    """Run a model on a prompt from zero states; one that takes fewer tokens at a time takes them in several steps.

    Args:
        token_ids: the prompt; random tokens by default (16, or as many as the model takes).
        given: inputs by name; what is missing is made.
        device, plugin: as for :func:`deltafuse.compare.compare`.
        batch, seed, dims, vocabulary: as for :class:`deltafuse.sample_inputs.SampleInputs`.

    Returns:
        The last step's outputs by name, and plain data about the run: ``outputs``, ``next_tokens``, ``steps``,
        ``device``, ``milliseconds`` (the second run's), ``nodes`` (by execution provider), ``note``.

    Raises:
        OptionError: inputs that do not fit, or cannot be made.
        DeltaFuseError: the model cannot be loaded or run.
    """
    signature = read_signature(model)
    inputs = SampleInputs(signature, batch=batch, seed=seed, dims=dims, vocabulary=vocabulary, given=given)
    count = len(token_ids) if token_ids is not None else (1 if inputs.fixed else 16)
    work = sequence(inputs, "run", count, 0, token_ids=token_ids)
    with open_runner(model, signature, device, plugin=plugin) as runner:
        run_sequence(runner, work)  # warms up
        begin = time.perf_counter()
        outputs = run_sequence(runner, work)[-1]
        taken = 1e3 * (time.perf_counter() - begin)
        placed = assignment(runner.session)
        found = {
            "model": os.fspath(model),
            "outputs": summary(outputs),
            "next_tokens": _next_tokens(signature, outputs),
            "steps": len(work.steps),
            "device": runner.device.name,
            "milliseconds": taken,
            "nodes": placed.counts(),
            "note": placed.note if plugin else "",
        }
    return outputs, found


def _next_tokens(signature: Signature, outputs: Mapping[str, Any], count: int = 5) -> list[int]:
    """The likeliest tokens after the first sequence, where an output has a score for each token."""
    if not signature.of("tokens"):
        return []
    name = next((name for name in signature.outputs if name not in signature.states.values()), "")
    logits = outputs.get(name)
    if logits is None or logits.ndim != 3 or not logits.size or logits.dtype.kind in "iub":
        return []
    return [int(token) for token in np.argsort(-logits[0, -1].astype(np.float64), kind="stable")[:count]]


def save_outputs(path: str | os.PathLike[str], outputs: Mapping[str, Any]) -> None:
    """Write outputs to a ``.npz`` file in one step, bfloat16 as float32.

    Raises:
        OutputError: it cannot be written.
    """
    target = Path(path)
    check_target(target)
    plain = {
        n: v.astype(np.float32) if v.dtype.kind == "V" or "bfloat" in str(v.dtype) else v for n, v in outputs.items()
    }
    aside = target.with_name(f".{target.name}.part")
    try:
        with aside.open("wb") as file:
            np.savez(file, **plain)
        os.replace(aside, target)
    except OSError as error:
        aside.unlink(missing_ok=True)
        raise OutputError(f"{target} was not written: {error.strerror or error}") from error
