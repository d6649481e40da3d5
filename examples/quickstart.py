"""deltafuse on a real export, from file to numbers: fuse it, prove it, run it before and after.

    python examples/quickstart.py

The two models are small exports of a bailing_hybrid (Ling 3) model with random weights, written by torch.onnx: one
takes a prompt, one takes a token and the states of the tokens before it. They come with the logits that PyTorch
computed. No GPU is needed. Exits with 1 if anything is not as it should be.
"""

from __future__ import annotations

import lzma
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import deltafuse
import numpy as np
import onnxruntime as ort
from deltafuse import show

DATA = Path(__file__).resolve().parent.parent / "tests" / "data"
PROMPT = "bailing_prefill_dynauto_batched"
DECODE = "bailing_wrap_decode_dyn_batched"
LENGTHS = (10, 60, 64, 65, 100, 200)  # those with PyTorch's logits
STEPS = 64
LIMIT = 1e-4  # relative error that float32 may have here

Arrays = Mapping[str, np.ndarray]
out = show.console()


def main() -> int:
    ort.set_default_logger_severity(4)  # the unfused prompt model is going to fail on purpose
    with tempfile.TemporaryDirectory() as folder:
        models = {name: unpack(name, Path(folder)) for name in (PROMPT, DECODE)}

        out.rule("1. Fuse and prove")
        fused = {name: path.with_suffix(".fused.onnx") for name, path in models.items()}
        for name, path in models.items():
            show.render(deltafuse.fuse(path, fused[name], require={"kda": 1}), out)
            out.print()

        out.rule("2. A prompt, before and after")
        sessions = open_sessions(models[PROMPT], fused[PROMPT])
        good = run_prompt(sessions)

        out.rule("3. Token by token, before and after")
        decoders = open_sessions(models[DECODE], fused[DECODE])
        good = run_decode(decoders) and good

        out.rule("4. Who ran what")
        table = show.table_of()
        for heading in ("model", "session", "nodes", "fused node"):
            table.add_column(heading, overflow="fold")
        for what, group in (("prompt", sessions), ("token", decoders)):
            for name, session in group.items():
                table.add_row(what, name, *who_ran_what(session))
        out.print(table)
        if missing := deltafuse.build_info()["missing"]:
            out.print(f"\nThe plugin was not built: {missing}")
    out.print("\nEverything is as it should be." if good else "\n[bold red]Something is wrong: see above.[/]")
    return 0 if good else 1


def unpack(name: str, folder: Path) -> Path:
    path = folder / f"{name}.onnx"
    path.write_bytes(lzma.decompress((DATA / f"{name}.onnx.xz").read_bytes()))
    return path


def open_sessions(unfused: Path, fused: Path) -> dict[str, ort.InferenceSession]:
    """The model before and after, in stock ONNX Runtime and, where the plugin was built, on its CPU kernels."""

    def options() -> ort.SessionOptions:
        settings = ort.SessionOptions()
        settings.add_session_config_entry("session.record_ep_graph_assignment_info", "1")  # for section 4
        settings.add_session_config_entry("session.intra_op.allow_spinning", "0")  # idle sessions take no core
        return settings

    def stock(path: Path) -> ort.InferenceSession:
        return ort.InferenceSession(path, options(), providers=["CPUExecutionProvider"])

    sessions = {"unfused": stock(unfused), "fused, no plugin": stock(fused)}
    if deltafuse.build_info()["native"]:
        sessions["fused, plugin"] = deltafuse.session(fused, device="cpu", sess_options=options())
    return sessions


def run_prompt(sessions: Mapping[str, ort.InferenceSession]) -> bool:
    """Each length through each session, against PyTorch's logits. The unfused model fails from token 65 on."""
    truth = np.load(DATA / f"{PROMPT}.truth.npz")
    table = show.table_of()
    for heading in ("tokens", *sessions):
        table.add_column(heading, justify="right")
    good, failure = True, ""
    for length in LENGTHS:
        feeds = {"input_ids": truth[f"T{length}|in|input_ids"]}
        expected = truth[f"T{length}|out|linear_19"]
        cells = []
        for name, session in sessions.items():
            try:
                (logits,), took = timed(lambda session=session, feeds=feeds: session.run(None, feeds))
            except Exception as problem:
                failure = str(problem)
                good = good and name == "unfused" and length > 64
                cells.append("[red]fails[/]")
                continue
            error = relative_error(logits, expected)
            good = good and error <= LIMIT
            cells.append(f"{show.seconds(took)}, error {error:.0e}")
        table.add_row(str(length), *cells)
    out.print(table)
    out.print("\nErrors are relative to PyTorch's logits; times are the best of 10 runs.")
    if failure:
        out.print("The export is right up to 64 tokens only. From token 65 on ONNX Runtime says of it:")
        out.print(f"  {' '.join(failure.split())[:140]} ...", markup=False)
    out.print()
    return good


def run_decode(sessions: Mapping[str, ort.InferenceSession]) -> bool:
    """The same tokens one by one, each step's states fed into the next, all sessions against the unfused one."""
    tokens = np.random.default_rng(0).integers(0, 128, STEPS)
    results = {name: decode(session, tokens) for name, session in sessions.items()}
    expected, before = results["unfused"]
    table = show.table_of()
    for heading in ("session", "a token", "against unfused", "worst error"):
        table.add_column(heading)
    good = True
    for name, (outputs, took) in results.items():
        error = max(relative_error(a, b) for a, b in zip(outputs, expected, strict=True))
        good = good and error <= LIMIT
        table.add_row(name, show.seconds(took), f"{before / took:.2f} x", f"{error:.0e}")
    out.print(table)
    out.print(f"\n{STEPS} tokens; the errors are those of all logits and of the last states.\n")
    return good


def decode(session: ort.InferenceSession, tokens: np.ndarray) -> tuple[list[np.ndarray], float]:
    """All steps' logits and the last states, and the median time of a step. States begin as zeros, caches empty."""
    inputs = session.get_inputs()
    states = [np.zeros([d if isinstance(d, int) else 0 for d in i.shape], np.float32) for i in inputs[1:]]
    logits, times = [], []
    for token in tokens:
        feeds = {i.name: value for i, value in zip(inputs, [np.array([[token]]), *states], strict=True)}
        begin = time.perf_counter()
        step, *states = session.run(None, feeds)
        times.append(time.perf_counter() - begin)
        logits.append(step)
    return [*logits, *states], median(times)


def who_ran_what(session: ort.InferenceSession) -> tuple[str, str]:
    """How many nodes each execution provider got, and which one got the fused node."""
    assigned = deltafuse.assignment(session)
    counts = [f"{count} on {provider}" for provider, count in assigned.counts().items() if provider]
    ours = [node.ep or "none: its ONNX body was inlined" for node in assigned if node.domain == "deltafuse"]
    return "\n".join(counts), "\n".join(ours)


def timed(work: Callable[[], Any], repeats: int = 10) -> tuple[Any, float]:
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        result = work()
        times.append(time.perf_counter() - begin)
    return result, min(times)


def relative_error(value: np.ndarray, truth: np.ndarray) -> float:
    return float(np.linalg.norm(value - truth) / max(float(np.linalg.norm(truth)), 1e-30))


if __name__ == "__main__":
    sys.exit(main())
