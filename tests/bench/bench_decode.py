"""Decode of a Ling-shaped model: eager runs, replayed CUDA graphs, and what a program without the runner would get.

    python tests/bench/bench_decode.py --out result.json          # on a GPU
    python tests/bench/bench_decode.py --device cpu --small       # tries the script itself

The model is made here, with random weights: layers of hidden 2560 with 32 heads of 128, one fused KDA node each, and a
SwiGLU block; no experts. One step is one token for each sequence of the batch. Times are wall-clock medians over blocks
of steps. "queued": steps are queued one behind another, as when tokens are sampled on the device; "waited": each step
is waited for and its logits are copied to the host. Before timing, replayed steps are compared with eager ones, bit for
bit. The floor is the time in which the device reads all weights and reads and writes all states once.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import deltafuse
import numpy as np
import onnx_ir as ir
import onnxruntime as ort

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
from small_model import LING, ModelSize, build

COPY_BYTES_PER_S = 4.3e12  # device copy of an H200, as measured
BLOCKS = 15


def options() -> ort.SessionOptions:
    made = ort.SessionOptions()
    made.log_severity_level = 3
    return made


def median_ms(block: Callable[[], None], steps: int, blocks: int = BLOCKS) -> float:
    """Milliseconds a step, the median over blocks of ``steps`` steps."""
    block()
    times = []
    for _ in range(blocks):
        begin = time.perf_counter()
        block()
        times.append(1e3 * (time.perf_counter() - begin) / steps)
    return statistics.median(times)


def time_runner(runner: Any, batch: int, steps: int) -> dict[str, float]:
    feeds = {"input_ids": np.arange(batch, dtype=np.int64)[:, None]}

    def queued() -> None:
        for _ in range(steps):
            runner.run(feeds, values=True)
        runner.synchronize()

    def waited() -> None:
        for _ in range(steps):
            runner.run(feeds)

    return {"queued_ms": median_ms(queued, steps), "waited_ms": median_ms(waited, steps)}


def time_replays(runner: Any, steps: int) -> float:
    """Nothing but launches of the captured graphs: no input is written, no output read."""
    plan = next(plan for plan in reversed(runner._plans.values()) if plan.graphs)  # the batch that ran last

    def block() -> None:
        for i in range(steps):
            plan.replay(i % plan.slots.count)
        runner.synchronize()

    return median_ms(block, steps)


def plain_session(model: Path, device: str, *, plugin: bool) -> Any:
    if plugin:
        return deltafuse.session(model, device, sess_options=options(), strict=True)
    first = [("CUDAExecutionProvider", {"device_id": 0})] if device != "cpu" else []
    return ort.InferenceSession(model, options(), providers=[*first, "CPUExecutionProvider"])


def time_plain_session(session: Any, batch: int, steps: int) -> float:
    """``session.run`` with NumPy states in and out: what a program does that knows nothing of bindings."""
    kinds = {"tensor(float)": np.float32, "tensor(float16)": np.float16}
    states = [
        np.zeros([batch if size == "batch" else size for size in value.shape], kinds[value.type])
        for value in session.get_inputs()[1:]
    ]
    names = [value.name for value in session.get_inputs()]
    ids = np.arange(batch, dtype=np.int64)[:, None]

    def block() -> None:
        nonlocal states
        for _ in range(steps):
            _, *states = session.run(None, dict(zip(names, [ids, *states], strict=True)))

    return median_ms(block, steps, 3)


def check(graphs: Any, eager: Any, batch: int) -> None:
    """Replayed steps give what eager ones give."""
    rng = np.random.default_rng(1)
    for made in (graphs, eager):
        made.reset()
    for i in range(12):
        feeds = {"input_ids": rng.integers(0, 256, (batch, 1))}
        a, b = graphs.run(feeds)["logits"], eager.run(feeds)["logits"]
        if not np.isfinite(a).all() or not np.array_equal(a, b):
            raise SystemExit(f"batch {batch}, step {i}: replayed and eager logits differ by {np.abs(a - b).max()}")
    for name, state in graphs.state_arrays().items():
        if not np.array_equal(state, eager.state_arrays()[name]):
            raise SystemExit(f"batch {batch}: state {name} differs after 12 steps")


def floor_ms(weights: int, size: ModelSize, batch: int) -> float:
    half = 4 if size.dtype == "FLOAT" else 2
    state = size.heads * size.head_dim * (size.head_dim * 4 + 9 * half)
    return 1e3 * (weights + 2 * batch * size.layers * state) / COPY_BYTES_PER_S


def measure(model: Path, rows: list[dict[str, Any]], device: str, steps: int, save: Callable[[], None]) -> None:
    """Fill in the rows, one a batch: each session is made once, since that takes longer than what is timed in it."""
    want = "never" if device == "cpu" else "always"
    how: dict[str, Any] = {"device": device, "strict": True}

    def feeds(row: dict[str, Any]) -> dict[str, Any]:
        return {"input_ids": np.arange(row["batch"], dtype=np.int64)[:, None]}

    def replayed(runner: Any, row: dict[str, Any], name: str) -> None:
        row[name] = time_runner(runner, row["batch"], steps)
        row[name]["launches_only_ms"] = time_replays(runner, steps)
        save()

    def prepare(runner: Any, row: dict[str, Any]) -> None:
        runner.reset()
        if want == "always" and not runner.prepare(feeds(row)):
            raise SystemExit(f"not captured: {runner.not_captured}")

    with deltafuse.capture(model, graphs="never", sess_options=options(), **how) as eager:
        for row in rows:
            eager.reset()
            row["eager"] = time_runner(eager, row["batch"], steps)
            save()
        if want == "always":
            with deltafuse.capture(model, graphs=want, sess_options=options(), **how) as graphs:
                for row in rows:
                    prepare(graphs, row)
                    check(graphs, eager, row["batch"])
                    replayed(graphs, row, "replayed")
    gc.collect()
    if want == "always":
        with deltafuse.capture(model, graphs="always", in_place=True, sess_options=options(), **how) as graphs:
            for row in rows:
                prepare(graphs, row)
                replayed(graphs, row, "replayed_in_place")
        gc.collect()
    for name, plugin in (("plain_session_ms", True), ("plain_session_bodies_ms", False)):
        session = plain_session(model, device, plugin=plugin)
        for row in rows:
            few = max(steps // (5 * row["batch"]), 2)
            row[name] = time_plain_session(session, row["batch"], few)
            save()


def machine() -> dict[str, str]:
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        gpu = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        gpu = "none"
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return {"gpu": gpu, "host": platform.processor() or platform.machine(), "onnxruntime": ort.__version__, "date": now}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--layers", type=int, default=LING.layers)
    parser.add_argument("--dtype", choices=["FLOAT16", "FLOAT"], default="FLOAT16")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--steps", type=int, default=100, help="steps of one timed block")
    parser.add_argument("--small", action="store_true", help="a model of a few hundred kilobytes")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    arguments = parser.parse_args()
    if arguments.device != "cpu" and "CUDAExecutionProvider" not in ort.get_available_providers():
        print("bench_decode: this onnxruntime has no CUDA EP; --device cpu --small tries the script", file=sys.stderr)
        return 2

    size = ModelSize(dtype=arguments.dtype) if arguments.small else replace(LING, dtype=arguments.dtype)
    size = replace(size, layers=min(size.layers, arguments.layers) if arguments.small else arguments.layers)
    result: dict[str, Any] = {"machine": machine(), "model": asdict(size), "steps": arguments.steps, "rows": []}
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "ling.onnx"
        ir.save(build(size), model, external_data="ling.data")
        weights = sum(path.stat().st_size for path in Path(folder).iterdir())
        result["weights_bytes"] = weights
        print(f"{size.layers} layers, {weights / 2**20:.0f} MiB, {size.dtype}, {result['machine']['gpu']}")
        rows = [{"batch": batch, "floor_ms": floor_ms(weights, size, batch)} for batch in arguments.batches]
        result["rows"] = rows

        def save() -> None:
            """After each figure: what was measured outlives a run that is cut short."""
            if arguments.out:
                arguments.out.write_text(json.dumps(result, indent=1) + "\n")

        measure(model, rows, arguments.device, arguments.steps, save)
        for row in rows:
            print(json.dumps(row), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
