"""Times real-size layers as torch.onnx.export leaves them, unfused and fused, outputs compared first.

    python tests/bench/bench_layer.py --device cuda --out result.json
    python tests/bench/bench_layer.py --device cpu --layers kda_512 --steps
    python tests/bench/bench_layer.py --device cuda --layers mla_step,moe_64,moe_1

The layers are those of tests/data/*.skel.onnx.xz (Ling-3.0-flash: hidden 2560, 32 heads of 128, float16, frozen at
512 and 2048 tokens) with random weights: kda_512, kda_2048, mla_2048, and mla_step, one token a sequence over a cache
of latents (BINDINGS). "fused, stock" is the fused model without the plugin: ORT inlines the function body.
``--steps`` adds one-token steps of a small hybrid model, unfused and fused. Times are medians of whole runs, with
inputs and outputs bound on the device where there is one. GPU memory is the device's free memory before the session
and after its runs: weights, activations, arenas and libraries' workspaces.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import deltafuse
import numpy as np
import onnx
import onnxruntime as ort

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from exports import library

RUNS = {"cuda": 30, "cpu": 5}
BINDINGS: dict[str, list[dict[str, int]]] = {
    "mla_step": [{"batch": 1, "past": 8192}, {"batch": 1, "past": 32768}, {"batch": 16, "past": 4096}]
}


def session(path: Path, device: str, plugin: bool) -> ort.InferenceSession:
    """A session on the device, with the plugin or without it."""
    if plugin:
        return deltafuse.session(str(path), device=device)
    providers = ["CUDAExecutionProvider", "CPUExecutionProvider"] if device == "cuda" else ["CPUExecutionProvider"]
    options = ort.SessionOptions()
    options.log_severity_level = 3
    made = ort.InferenceSession(str(path), options, providers=providers)
    made.disable_fallback()
    return made


def timed(
    made: ort.InferenceSession, feeds: dict[str, np.ndarray], device: str
) -> tuple[list[np.ndarray], dict[str, float]]:
    """Outputs, and milliseconds of a run."""
    binding = made.io_binding()
    for name, array in feeds.items():
        binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(array, device, 0))
    for value in made.get_outputs():
        binding.bind_output(value.name, device)
    for _ in range(3):
        made.run_with_iobinding(binding)
    outputs = binding.copy_outputs_to_cpu()
    times = []
    for _ in range(RUNS[device]):
        binding.synchronize_inputs()
        start = time.perf_counter()
        made.run_with_iobinding(binding)
        binding.synchronize_outputs()
        times.append(1e3 * (time.perf_counter() - start))
    return outputs, {"median_ms": statistics.median(times), "min_ms": min(times), "runs": len(times)}


def feeds_of(proto: onnx.ModelProto, binding: dict[str, int]) -> dict[str, np.ndarray]:
    """Random numbers for a layer's hidden states and caches; a layer with rotation takes cosines and sines too."""
    rng = np.random.default_rng(1)
    shapes = {
        x.name: [binding.get(d.dim_param) or d.dim_value for d in x.type.tensor_type.shape.dim]
        for x in proto.graph.input
    }
    (hidden, *others) = shapes
    feeds = {hidden: rng.standard_normal(shapes[hidden])}
    for name, turn in zip(others, (np.cos, np.sin), strict=False):
        feeds[name] = turn(np.random.default_rng(2).uniform(-np.pi, np.pi, shapes[name]))
    for name in others[2:]:
        feeds[name] = rng.standard_normal(shapes[name])
    return {name: value.astype(np.float16) for name, value in feeds.items()}


def used_memory(device: str) -> int | None:
    """Bytes in use on the GPU, by whoever."""
    if device != "cuda":
        return None
    import torch

    free, total = torch.cuda.mem_get_info()
    return int(total - free)


def measure(model: Path, fused: Path, feeds: dict[str, np.ndarray], device: str, weights: int) -> dict[str, Any]:
    """Each variant in turn; the unfused one first, so that its arena is gone before the next is measured."""
    row: dict[str, Any] = {}
    truth: list[np.ndarray] | None = None
    variants = (("unfused", model, False), ("fused, stock", fused, False), ("fused, plugin", fused, True))
    for name, path, plugin in variants:
        before = used_memory(device)
        made = session(path, device, plugin)
        outputs, row[name] = timed(made, feeds, device)
        after = used_memory(device)
        if before is not None and after is not None:
            row[name]["gpu_bytes"] = after - before
            row[name]["gpu_bytes_beyond_weights"] = after - before - weights
        if truth is None:
            truth = outputs
        else:
            row[name]["error"] = max(library.error(o, t) for o, t in zip(outputs, truth, strict=True))
            row[name]["times_faster"] = row["unfused"]["median_ms"] / row[name]["median_ms"]
        if plugin:
            nodes = [a for a in deltafuse.assignment(made) if a.domain == "deltafuse"]
            row[name]["assignment"] = sorted({f"{a.op_type}: {a.ep}" for a in nodes})
        del made
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--layers", default="kda_512,kda_2048,mla_2048")
    parser.add_argument("--steps", action="store_true", help="one-token steps of a small hybrid model too")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in filter(None, args.layers.split(",")):
            model, fused = Path(folder) / f"{name}.onnx", Path(folder) / f"{name}.fused.onnx"
            proto = library.real_layer(name)
            weights = sum(int(np.prod(t.dims)) * 2 for t in proto.graph.initializer if len(t.raw_data) > 1 << 16)
            onnx.save(proto, model)
            report = deltafuse.fuse(model, fused, require={name.split("_")[0]: 1})
            for binding in BINDINGS.get(name, [{}]):
                row = measure(model, fused, feeds_of(proto, binding), args.device, weights)
                row |= {"nodes": [report.nodes_before, report.nodes_after], "fuse_seconds": report.seconds}
                row["file_bytes"] = [model.stat().st_size, fused.stat().st_size]
                rows[" ".join((name, *(f"{k} {v}" for k, v in binding.items())))] = row
        if args.steps:
            export = library.export("hybrid4_decode")
            model, fused = Path(folder) / "steps.onnx", Path(folder) / "steps.fused.onnx"
            onnx.save(export.proto(), model)
            deltafuse.fuse(model, fused, require={"kda": 3})
            rows["hybrid4_decode"] = measure(model, fused, export.feeds(export.bindings[0]), args.device, 0)
    gpu = None
    if args.device == "cuda":
        query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        gpu = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    try:
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    except OSError:
        commit = ""
    result = {
        "benchmark": "bench_layer",
        "date": datetime.date.today().isoformat(),
        "commit": commit,
        "device": gpu or platform.processor() or platform.machine(),
        "onnxruntime": ort.__version__,
        "rows": rows,
    }
    for name, row in rows.items():
        for variant in ("unfused", "fused, stock", "fused, plugin"):
            entry = row[variant]
            extra = f" {entry['times_faster']:.1f}x error {entry['error']:.1e}" if "error" in entry else ""
            memory = f" {entry['gpu_bytes'] / 2**30:.2f} GiB" if "gpu_bytes" in entry else ""
            print(f"{name:30s} {variant:14s} {entry['median_ms']:9.3f} ms{extra}{memory}", flush=True)
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
