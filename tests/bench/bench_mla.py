"""LatentAttention's CUDA kernels beside cuDNN (through PyTorch) and plain PyTorch ops, in one process, numbers first.

    python tests/bench/bench_mla.py --out tests/bench/results/mla.json
    python tests/bench/bench_mla.py --only decode

"attention" is the attention alone (for tokens: latent queries in, latent output out, its two kernels; for prompts:
expanded keys in), "op" the whole op: norm, rotation, cache write, both projections, gate. Prompts are timed by CUDA
events around one call; tokens by replaying a CUDA graph of many calls, which go round among caches that together exceed
the L2 cache ("cold") or stay with one ("warm"). Every row is compared with float64 before it is timed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bench.mla_layer import FIELDS
from gpu.mla_runner import Call, Kernels, MlaConfig, find_library

#: What an H200 reaches: copy bandwidth in TB/s, bf16 products in TFLOP/s.
BANDWIDTH, PRODUCTS = 4.3, 790.0
L2_BYTES = 60 * 2**20
LAYER = MlaConfig(**FIELDS, static_cache=True)


@dataclass(frozen=True)
class Step:
    """New tokens over a cache."""

    batch: int
    tokens: int  # in the cache, the new ones included
    heads: int = 32
    new: int = 1
    cache_type: str = "same"
    bar: str = ""

    def config(self) -> MlaConfig:
        return replace(LAYER, num_heads=self.heads, cache_type=self.cache_type)

    def cache_bytes(self) -> int:
        latent = {"same": 1024, "int8": 512, "float8": 512 + 16}[self.cache_type]
        return self.batch * self.tokens * (latent + 128)


STEPS = (
    Step(1, 8192, bar="12 us"),
    Step(1, 32768, bar="25 us"),
    Step(16, 4096, bar="2.4 TB/s"),
    Step(64, 4096, bar="3.2 TB/s"),
    Step(128, 4096),
    Step(1, 1024),
    Step(8, 4096),
    Step(64, 4096, heads=64),
    Step(64, 4096, heads=128),
    Step(16, 4096, new=4),
    Step(1, 8192, cache_type="int8"),
    Step(64, 4096, cache_type="int8"),
    Step(1, 8192, cache_type="float8"),
    Step(64, 4096, cache_type="float8"),
)
PROMPTS = (2048, 4096, 8192, 16384, 32768)


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16, size: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, device="cuda") * size).to(dtype)


def weights(config: MlaConfig) -> torch.Tensor:
    width = config.num_heads * (config.qk_nope_head_dim + config.v_head_dim)
    return normal(config.kv_lora_rank, width, size=config.kv_lora_rank**-0.5)


def new_tokens(config: MlaConfig, batch: int, tokens: int) -> dict[str, torch.Tensor]:
    angle = torch.rand(1, tokens, 32, device="cuda") * 6.28
    angle = torch.cat([angle, angle], -1)
    return {
        "q": normal(batch, tokens, config.num_heads * config.qk_head_dim),
        "latent": normal(batch, tokens, config.kv_lora_rank),
        "k_rope": normal(batch, tokens, config.qk_rope_head_dim),
        "kv_norm_weight": torch.rand(config.kv_lora_rank, device="cuda") + 0.5,
        "cos": angle.cos(),
        "sin": angle.sin(),
        "gate": normal(batch, tokens, config.num_heads),
    }


def cache_of(step: Step) -> dict[str, torch.Tensor]:
    shape = (step.batch, step.tokens)
    rope = normal(*shape, 64)
    if step.cache_type == "same":
        return {"past_latent": normal(*shape, 512), "past_k_rope": rope}
    if step.cache_type == "int8":
        codes = torch.randint(-127, 128, (*shape, 512), device="cuda", dtype=torch.int8)
        scale = torch.rand(512, device="cuda") * 0.02 + 0.01
        return {"past_latent": codes, "past_k_rope": rope, "past_latent_scale": scale}
    codes = normal(*shape, 512, size=60.0).clamp(-440, 440).to(torch.float8_e4m3fn)
    return {"past_latent": codes, "past_k_rope": rope, "past_latent_scale": torch.rand(*shape, 4, device="cuda") * 0.02}


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Half layout, the last axis; cos and sin broadcast."""
    return x * cos + torch.cat([-x[..., 32:], x[..., :32]], -1) * sin


def truth(step: Step, x: dict[str, torch.Tensor], row: int) -> torch.Tensor:
    """Row ``row`` of the output in float64, after a call that wrote the new tokens into the cache."""
    config = step.config()
    h, s = config.num_heads, step.new
    latent = x["past_latent"][row].double()
    if step.cache_type == "int8":
        latent = latent * x["past_latent_scale"].double()
    elif step.cache_type == "float8":
        latent = latent * x["past_latent_scale"][row].double().repeat_interleave(128, -1)
    key = x["past_k_rope"][row].double()
    q = x["q"][row].double().view(s, h, 192)
    w = x["kv_b_weight"].double().view(512, h, 256)
    q_rope = rotated(q[..., 128:], x["cos"][0].double()[:, None], x["sin"][0].double()[:, None])
    q_latent = torch.einsum("shd,rhd->shr", q[..., :128], w[..., :128])
    scores = config.scale * (q_latent @ latent.T + q_rope @ key.T)
    at = torch.arange(step.tokens, device="cuda")
    last = step.tokens - s + torch.arange(s, device="cuda")
    scores = scores.masked_fill((at[None] > last[:, None])[:, None], -math.inf)
    o = torch.einsum("shr,rhd->shd", torch.softmax(scores, -1) @ latent, w[..., 128:])
    return (o * torch.sigmoid(x["gate"][row].double())[..., None]).reshape(s, -1)


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


def time_call(run: Callable[[], Any], repeats: int) -> float:
    """Median milliseconds, by events around each call."""
    for _ in range(3):
        run()
    times = []
    for _ in range(repeats):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop))
    return statistics.median(times)


def time_replayed(calls: list[Callable[[], Any]], repeats: int = 20) -> float:
    """Median milliseconds a call, of a CUDA graph that holds all of ``calls``."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return time_call(graph.replay, repeats) / len(calls)


def plain_step(step: Step, x: dict[str, torch.Tensor]) -> Callable[[], Any]:
    """The attention alone by PyTorch's own products and softmax."""
    rows = step.heads * step.new
    q, q_rope = normal(step.batch, rows, 512), normal(step.batch, rows, 64)
    latent, key = x["past_latent"], x["past_k_rope"]

    def run() -> torch.Tensor:
        scores = torch.baddbmm(q_rope @ key.mT, q, latent.mT)
        return torch.softmax(scores * LAYER.scale, -1) @ latent

    return run


def bench_step(kernels: Kernels, step: Step) -> dict[str, Any]:
    config = step.config()
    count = max(1, min(8, math.ceil(3 * L2_BYTES / step.cache_bytes())))
    operands = new_tokens(config, step.batch, step.new) | {"kv_b_weight": weights(config)}
    operands["cache_lengths"] = torch.full((step.batch,), step.tokens - step.new, dtype=torch.int32, device="cuda")
    calls, tensors = [], []
    for _ in range(count):
        x = operands | cache_of(step)
        tensors.append(x)
        calls.append(kernels.prepare(Call(config, x, in_place=True), keep_weights=False))
    for call in calls:
        kernels.launch(call)
    torch.cuda.synchronize()
    worst = max(
        relative(call.outputs["o"][row], truth(step, x, row))
        for call, x in list(zip(calls, tensors, strict=True))[:2]
        for row in {0, step.batch - 1}
    )
    launches = max(count, 8)
    cold = [calls[i % count] for i in range(launches)]
    times = {
        "attention, cold": time_replayed([lambda c=c: kernels.launch(c, core=True) for c in cold]),
        "attention, warm": time_replayed([lambda: kernels.launch(calls[0], core=True)] * launches),
        "op, cold": time_replayed([lambda c=c: kernels.launch(c) for c in cold]),
    }
    if step.cache_type == "same" and step.heads * step.new <= 64:
        times["plain PyTorch"] = time_replayed([plain_step(step, tensors[i % count]) for i in range(min(launches, 4))])
    floor = step.cache_bytes() / BANDWIDTH / 1e9
    row = {
        "case": f"B{step.batch} x {step.tokens} H{step.heads}" + (f" S{step.new}" if step.new > 1 else ""),
        "cache": step.cache_type,
        "bar": step.bar,
        "error": worst,
        "us": {name: 1e3 * ms for name, ms in times.items()},
        "tb_per_s": {name: step.cache_bytes() / ms / 1e9 for name, ms in times.items()},
        "of_limit": floor / times["attention, cold"],
    }
    for call in calls:
        kernels.release(call)
    torch.cuda.empty_cache()
    if not worst < 2e-2:
        raise RuntimeError(f"{row['case']}: error {worst:.1e}")
    return row


def prompt_truth(x: dict[str, torch.Tensor], config: MlaConfig, head: int, rows: torch.Tensor) -> torch.Tensor:
    """Some rows of one head in float64, no cache."""
    latent = x["latent"][0].double()
    latent = latent / (latent.pow(2).mean(-1, keepdim=True) + config.kv_norm_eps).sqrt() * x["kv_norm_weight"].double()
    cos, sin = x["cos"][0].double(), x["sin"][0].double()
    w = x["kv_b_weight"].double().view(512, config.num_heads, 256)[:, head]
    key = torch.cat([latent @ w[:, :128], rotated(x["k_rope"][0].double(), cos, sin)], -1)
    q = x["q"][0].double().view(-1, config.num_heads, 192)[rows, head]
    q = torch.cat([q[:, :128], rotated(q[:, 128:], cos[rows], sin[rows])], -1)
    scores = config.scale * q @ key.T
    scores = scores.masked_fill(torch.arange(key.shape[0], device="cuda")[None] > rows[:, None], -math.inf)
    gate = torch.sigmoid(x["gate"][0, rows, head].double())
    return torch.softmax(scores, -1) @ (latent @ w[:, 128:]) * gate[:, None]


def bench_prompt(kernels: Kernels, tokens: int, dtype: torch.dtype, repeats: int) -> dict[str, Any]:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    config = replace(LAYER, cache="none", has_past=False, has_present=False, static_cache=False)
    x = new_tokens(config, 1, tokens) | {"kv_b_weight": weights(config)}
    x = {name: value.to(dtype) if value.dtype == torch.bfloat16 else value for name, value in x.items()}
    call = kernels.prepare(Call(config, x), keep_weights=False)
    kernels.launch(call)
    torch.cuda.synchronize()
    rows = torch.randint(0, tokens, (64,), device="cuda")
    rows[:2] = torch.tensor([0, tokens - 1], device="cuda")
    worst = 0.0
    for head in (0, 17, 31):
        got = call.outputs["o"].view(tokens, 32, 128)[rows, head]
        worst = max(worst, relative(got, prompt_truth(x, config, head, rows)))
    q, k = normal(1, 32, tokens, 192, dtype=dtype), normal(1, 32, tokens, 192, dtype=dtype)
    v = normal(1, 32, tokens, 128, dtype=dtype)

    def cudnn() -> torch.Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=config.scale)

    times: dict[str, float] = {}
    for _ in range(2):  # by turns; the better of two medians
        for name, run in (
            ("attention", lambda: kernels.launch(call, core=True)),
            ("cuDNN", cudnn),
            ("op", lambda: kernels.launch(call)),
        ):
            ms = time_call(run, repeats)
            times[name] = min(times.get(name, ms), ms)
    flops = 2 * 32 * (192 + 128) * tokens * (tokens + 1) / 2
    row = {
        "case": f"B1 T{tokens} H32 {str(dtype).removeprefix('torch.')}",
        "error": worst,
        "ms": times,
        "tflops": {name: flops / ms / 1e9 for name, ms in times.items()},
        "of_cudnn": times["attention"] / times["cuDNN"],
        "of_limit": flops / PRODUCTS / 1e9 / times["attention"],
    }
    kernels.release(call)
    torch.cuda.empty_cache()
    if not worst < 2e-2:
        raise RuntimeError(f"{row['case']}: error {worst:.1e}")
    return row


def show(row: dict[str, Any]) -> None:
    numbers = row.get("us") or row["ms"]
    rates = row.get("tb_per_s") or row["tflops"]
    text = "  ".join(f"{name} {value:.4g} ({rates[name]:.4g})" for name, value in numbers.items())
    print(
        f"{row['case']:24s} {row.get('cache', ''):7s} {text}  limit {row['of_limit']:.2f} error {row['error']:.1e}",
        flush=True,
    )


def output_of(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("decode", "prompt"))
    parser.add_argument("--first", type=int, default=len(STEPS), help="only the first N decode cases")
    parser.add_argument("--longest", type=int, default=PROMPTS[-1])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    library = find_library()
    if library is None or not torch.cuda.is_available():
        print("bench_mla: skipped, no GPU or no library (DELTAFUSE_MLA_LIBRARY)")
        return 0
    torch.manual_seed(0)
    kernels = Kernels(library)
    result: dict[str, Any] = {
        "benchmark": "bench_mla",
        "date": datetime.date.today().isoformat(),
        "commit": output_of("git", "rev-parse", "--short", "HEAD"),
        "gpu": output_of("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"),
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),
        "rows": [],
    }
    jobs: list[Callable[[], dict[str, Any]]] = []
    if args.only != "prompt":
        jobs += [lambda step=step: bench_step(kernels, step) for step in STEPS[: args.first]]
    if args.only != "decode":
        jobs += [lambda t=t: bench_prompt(kernels, t, torch.bfloat16, 10) for t in PROMPTS if t <= args.longest]
        jobs += [lambda: bench_prompt(kernels, 8192, torch.float16, 10)]
    for job in jobs:
        row = job()
        show(row)
        result["rows"].append(row)
        if args.out:
            args.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
