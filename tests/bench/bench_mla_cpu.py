"""Times the LatentAttention CPU kernel beside the same layer as an unfused float32 graph, numbers checked first.

    python tests/bench/bench_mla_cpu.py --out result.json

32 heads of 128 + 64 and 128 channels, latents of 512, a norm, rotation and an output gate; the linear layers around it
are left out. Two unfused graphs for ONNX Runtime's CPU EP: "latents" keeps latents and makes all keys and values again
with every token, as transformers 5 exports the family; "keys and values" keeps those. "body" is the fused node without
the plugin, "kernel" with its kernel, driven as the plugin drives it, on as many threads as ONNX Runtime has. 16- and
8-bit caches are static and written in place. Runs are interleaved; the least and the median of each are written. With
`--threads 1` it is the thread's own processor time, which others on the machine change little.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import TensorProto, helper

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bench.bench_moe_cpu import Graph, _cpu
from bench.mla_layer import FIELDS
from deltafuse.custom_ops.mla.draw import draw_inputs
from deltafuse.custom_ops.mla.reference import reference, relative_error
from deltafuse.custom_ops.mla.spec import MlaConfig
from mla.cpu_library import PAIRS, CpuKernel, compile_library, empty_outputs, fill
from mla.onnx_call import call_model, feeds

Arrays = dict[str, NDArray[Any]]
LAYER = MlaConfig(**FIELDS)
#: Type T and the cache's type of the kernel's rows.
FORMS = (("float32", "same"), ("float16", "same"), ("bfloat16", "same"), ("bfloat16", "int8"), ("bfloat16", "float8"))
LIMITS = {"float32": 1e-4, "float16": 5e-3, "bfloat16": 2e-2}


def _rotated(g: Graph, x: str) -> str:
    first, second = g.op("Split", x, g.const(np.array([32, 32])), outputs=2, axis=-1)
    turned = g.op("Concat", g.op("Neg", second), first, axis=-1)
    return str(g.op("Add", g.op("Mul", x, "cos"), g.op("Mul", turned, "sin")))


def unfused(config: MlaConfig, inputs: Arrays, keep: str, prompt: bool) -> bytes:
    """The layer in standard ops, as exporters write it. ``keep``: what the cache holds."""
    g = Graph()
    heads, nope, rope, wide = 32, 128, 64, 128

    def by_head(x: str, width: int) -> str:
        return str(g.op("Transpose", g.op("Reshape", x, g.const(np.array([0, 0, heads, width]))), perm=[0, 2, 1, 3]))

    q_nope, q_rope = g.op("Split", by_head("q", nope + rope), g.const(np.array([nope, rope])), outputs=2, axis=-1)
    query = g.op("Concat", q_nope, _rotated(g, q_rope), axis=-1)
    mean = g.op("ReduceMean", g.op("Mul", "latent", "latent"), g.const(np.array([-1])))
    root = g.op("Sqrt", g.op("Add", mean, g.const(np.float32(config.kv_norm_eps))))
    latent = g.op("Mul", g.op("Div", "latent", root), g.const(inputs["kv_norm_weight"]))
    k_rope = _rotated(g, "k_rope")
    given = ["q", "latent", "k_rope", "cos", "sin", "gate"]
    if not prompt and keep == "latents":
        given += ["past_latent", "past_k_rope"]
        latent, k_rope = g.op("Concat", "past_latent", latent, axis=1), g.op("Concat", "past_k_rope", k_rope, axis=1)
    both = by_head(g.op("MatMul", latent, g.const(inputs["kv_b_weight"])), nope + wide)
    key, value = g.op("Split", both, g.const(np.array([nope, wide])), outputs=2, axis=-1)
    shared = g.op("Expand", g.op("Unsqueeze", k_rope, g.const(np.array([1]))), g.const(np.array([1, heads, 1, 1])))
    key = g.op("Concat", key, shared, axis=-1)
    if not prompt and keep == "keys and values":
        given += ["past_key", "past_value"]
        key, value = g.op("Concat", "past_key", key, axis=2), g.op("Concat", "past_value", value, axis=2)
    scores = g.op("MatMul", query, g.op("Transpose", key, perm=[0, 1, 3, 2]))
    scores = g.op("Mul", scores, g.const(np.float32(config.scale)))
    if prompt:
        scores, given = g.op("Add", scores, "mask"), [*given, "mask"]
    o = g.op("MatMul", g.op("Softmax", scores, axis=-1), value)
    gate = g.op("Unsqueeze", g.op("Sigmoid", "gate"), g.const(np.array([3])))
    o = g.op("Mul", g.op("Transpose", o, perm=[0, 2, 1, 3]), gate)
    g.nodes.append(helper.make_node("Reshape", [o, g.const(np.array([0, 0, heads * wide]))], ["o"]))
    results = ["o"]
    if not prompt:  # the caches are outputs too
        results += [latent, k_rope] if keep == "latents" else [key, value]
    ends = [[helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in names] for names in (given, results)]
    graph = helper.make_graph(g.nodes, "layer", *ends, g.tensors)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    return bytes(model.SerializeToString())


def in_session(model: bytes | onnx.ModelProto, given: Arrays, threads: int) -> Callable[[], NDArray[Any]]:
    options = ort.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 3, threads
    text = model if isinstance(model, bytes) else model.SerializeToString()
    session = ort.InferenceSession(text, options, providers=["CPUExecutionProvider"])
    wanted = {value.name: given[value.name] for value in session.get_inputs()}
    return lambda: session.run(None, wanted)[0]


def on_kernel(kernel: CpuKernel, config: MlaConfig, inputs: Arrays, threads: int) -> Callable[[], NDArray[Any]]:
    inputs = {name: np.ascontiguousarray(x) for name, x in inputs.items()}
    outputs = empty_outputs(config, inputs)
    if config.static_cache:
        for past, present in PAIRS:
            if past in inputs and present in outputs:
                outputs[present] = inputs[past]
    params = fill(config, inputs, outputs)
    library = kernel._library
    size = library.deltafuse_mla_cpu_workspace_bytes(ctypes.byref(params))
    workspace = np.zeros(size // 4 + 16, np.float32)

    def run() -> NDArray[Any]:
        reason = library.deltafuse_mla_cpu_forward(
            ctypes.byref(params), ctypes.c_void_p(workspace.ctypes.data), ctypes.c_int(threads)
        )
        assert reason is None and inputs, reason
        return outputs["o"]

    return run


def expanded_cache(config: MlaConfig, inputs: Arrays) -> Arrays:
    """Keys and values of what a cache of latents holds."""
    latent, rope = inputs["past_latent"], inputs["past_k_rope"]
    both = (latent @ inputs["kv_b_weight"]).reshape(1, -1, 32, 256).transpose(0, 2, 1, 3)
    shared = np.broadcast_to(rope[:, None], (1, 32, *rope.shape[1:]))
    return {
        "past_key": np.ascontiguousarray(np.concatenate([both[..., :128], shared], -1)),
        "past_value": np.ascontiguousarray(both[..., 128:]),
    }


def rows_of(kernel: CpuKernel, past: int, tokens: int, threads: int) -> dict[str, Callable[[], NDArray[Any]]]:
    """What is timed, by name; each gives o. All of them were compared with float64."""
    prompt = past == 0
    config = replace(LAYER, cache="none", has_past=False, has_present=False) if prompt else LAYER
    inputs = draw_inputs(config, 1, tokens, past, np.random.default_rng(0))
    truth = reference(config, inputs)["o"]
    rows: dict[str, Callable[[], NDArray[Any]]] = {}
    given = {**inputs}
    if prompt:
        given["mask"] = np.where(np.tril(np.ones((tokens, tokens), bool)), 0, -np.inf).astype(np.float32)
        rows["unfused"] = in_session(unfused(config, inputs, "", True), given, threads)
    else:
        given |= expanded_cache(config, inputs)
        for keep in ("latents", "keys and values"):
            rows[f"unfused, {keep}"] = in_session(unfused(config, inputs, keep, False), given, threads)
    rows["body"] = in_session(call_model(config, inputs, seq_len=tokens, constant_weight=True), feeds(inputs), threads)
    for dtype, cache_type in FORMS:
        if prompt and cache_type != "same":
            continue
        own, drawn = config, inputs
        if (dtype, cache_type) != ("float32", "same"):
            own = replace(config, cache_type=cache_type, static_cache=not prompt)
            drawn = draw_inputs(own, 1, tokens, past + tokens, np.random.default_rng(0), "full-cache", dtype)
        name = f"kernel, {dtype}" + (f", {cache_type} cache" if cache_type != "same" else "")
        rows[name] = on_kernel(kernel, own, drawn, threads)
        want = truth if drawn is inputs else reference(own, drawn)["o"]
        error = relative_error(rows[name]().astype(np.float32), want)
        assert error < LIMITS[dtype], f"{name}: {error:.1e}"
    for name in [n for n in rows if not n.startswith("kernel")]:
        error = relative_error(rows[name](), truth)
        assert error < LIMITS["float32"], f"{name}: {error:.1e}"
    return rows


def timed(
    rows: dict[str, Callable[[], NDArray[Any]]], runs: int, clock: Callable[[], float]
) -> dict[str, dict[str, float]]:
    """Milliseconds of each."""
    times: dict[str, list[float]] = {name: [] for name in rows}
    for _ in range(runs):
        for name, run in rows.items():
            start = clock()
            run()
            times[name].append(1e3 * (clock() - start))
    return {
        name: {"least": round(min(found), 3), "median": round(statistics.median(found), 3)}
        for name, found in times.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tokens", type=int, nargs="*", default=[1024, 4096], help="in the caches, for single tokens")
    parser.add_argument("--prompts", type=int, nargs="*", default=[256, 1024], help="lengths of prompts")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    alone = options.threads == 1
    result: dict[str, Any] = {
        "benchmark": "bench_mla_cpu",
        "date": datetime.date.today().isoformat(),
        "cpu": _cpu(),
        "threads": options.threads,
        "clock": "processor time of the thread" if alone else "wall",
        "onnxruntime": ort.__version__,
        "runs": options.runs,
        "load": [],  # how many others wanted the processor, before each case
        "milliseconds": {},
    }
    with tempfile.TemporaryDirectory() as folder:
        library = compile_library(Path(folder))
        if library is None:
            print("bench_mla_cpu: skipped, no C++ compiler (c++, g++ or clang++)")
            return
        kernel = CpuKernel(library)
        cases = [(f"one token on {past}", past, 1) for past in options.tokens]
        cases += [(f"prompt of {length}", 0, length) for length in options.prompts]
        for name, past, tokens in cases:
            result["load"].append(round(os.getloadavg()[0], 1))
            rows = rows_of(kernel, past, tokens, options.threads)
            runs = options.runs if tokens == 1 else max(3, options.runs // 3)
            result["milliseconds"][name] = timed(rows, runs, time.thread_time if alone else time.perf_counter)
    result["shared"] = max(result["load"]) > 1  # with others: the least times are the telling ones
    text = json.dumps(result, indent=1)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
