"""Times GroupedQMoE's CUDA kernels in the shape of Ling-3.0-flash, and beside ONNX Runtime's QMoE.

    python tests/bench/bench_moe.py --library build/libdeltafuse_ep.so --out result.json

Needs a GPU and PyTorch. Numbers are checked first, against float64 on the same stored weights. Without an onnxruntime
that has the CUDA EP, QMoE is said to be missing and left out (the block as exported is bench_layer.py's). Times are
medians: small calls replayed from a graph of several calls with different tokens, whose weights together are many
times the L2; prompts, and what is compared with QMoE, by CUDA events around a call. --kernels also prints each
kernel's own time by PyTorch's profiler.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from gpu.moe_runner import Call, Kernels, Layer, MoeConfig, find_library, tolerance

COPY_BYTES_PER_S = 4.3e12  # device copy and bf16 matmul of an H200 as measured; the limits are stated against these
MATMUL_FLOPS = {"int4:128": 7.0e14, "int8:128": 7.0e14, "bf16": 7.0e14, "fp8:128x128": 1.4e15}

LING = MoeConfig(
    num_experts=512,
    top_k=8,
    hidden_size=2560,
    intermediate_size=768,
    shared_intermediate_size=768,
    n_group=8,
    topk_group=4,
    norm_eps=1e-20,
    routed_scaling_factor=2.5,
    has_expert_bias=True,
    has_ids=True,
)
FORMS: dict[str, MoeConfig] = {
    "int4:128": replace(LING, weight_format="int4", shared_format="int4", block_size=128, shared_block_size=128),
    "int8:128": replace(LING, weight_format="int8", shared_format="int8", block_size=128, shared_block_size=128),
    "fp8:128x128": replace(
        LING, weight_format="float8", shared_format="float8", block_size=128, block_rows=128, shared_block_size=128,
        shared_block_rows=128,
    ),
    "bf16": LING,
}  # fmt: skip
BYTES_PER_WEIGHT = {"int4:128": 0.5 + 2 / 128, "int8:128": 1 + 2 / 128, "fp8:128x128": 1.0, "bf16": 2.0}


def draw(form: str, device: str = "cuda") -> dict[str, torch.Tensor]:
    """Weights of a whole layer, made on the device."""
    c = FORMS[form]
    rng = torch.Generator(device).manual_seed(1)
    tensors: dict[str, torch.Tensor] = {
        "router_weight": torch.randn(c.num_experts, c.hidden_size, generator=rng, device=device) * c.hidden_size**-0.5,
        "expert_bias": 0.02 * torch.randn(c.num_experts, generator=rng, device=device),
    }
    for name, lead, rows, cols in (
        ("gate_up", c.num_experts, 2 * c.intermediate_size, c.hidden_size),
        ("down", c.num_experts, c.hidden_size, c.intermediate_size),
        ("shared_gate_up", 1, 2 * c.shared_intermediate_size, c.hidden_size),
        ("shared_down", 1, c.hidden_size, c.shared_intermediate_size),
    ):
        kind, (block, block_rows), _ = c.weights_form(name)
        size = cols**-0.5
        if kind == "float":
            weight = torch.empty(lead, rows, cols, dtype=torch.bfloat16, device=device)
            for part in weight:
                part.copy_(size * torch.randn(rows, cols, generator=rng, device=device))
            tensors[f"{name}_weight"] = weight
            continue
        width = cols // 2 if kind == "int4" else cols
        stored = torch.randint(0, 256, (lead, rows, width), generator=rng, device=device, dtype=torch.uint8)
        spread = {"int4": 4.6, "int8": 74.0, "float8": 60.0}[kind]
        if kind == "float8":
            stored = torch.where((stored & 127) > 118, stored & 247, stored)  # up to 208, no NaN
        scales = (lead, -(-rows // block_rows), -(-cols // block))
        jitter = torch.rand(scales, generator=rng, device=device) + 0.5
        tensors[f"{name}_weight"] = stored.view(torch.int8) if kind == "int8" else stored
        tensors[f"{name}_scale"] = size / spread * jitter
    return tensors


def dequantized(config: MoeConfig, t: dict[str, torch.Tensor], name: str, expert: int) -> torch.Tensor:
    """One expert's matrix in float64."""
    kind, (block, block_rows), _ = config.weights_form(name)
    stored = t[f"{name}_weight"][expert]
    if kind == "float":
        return stored.double()
    if kind == "int4":
        both = torch.stack([stored & 15, stored >> 4], -1).reshape(stored.shape[0], -1)
        value = (both ^ 8).double() - 8.0
    elif kind == "int8":
        value = stored.double()
    else:
        value = stored.view(torch.float8_e4m3fn).double()
    scale = t[f"{name}_scale"][expert].double()
    return value * scale.repeat_interleave(block_rows, 0).repeat_interleave(block, 1)


def truth(
    config: MoeConfig, t: dict[str, torch.Tensor], rows: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> Any:
    """The block's result in float64 for some tokens, with the ids and weights that were chosen."""
    x = t["x"][rows].double()

    def expert(prefix: str, index: int, x: torch.Tensor) -> torch.Tensor:
        gate, up = (x @ dequantized(config, t, f"{prefix}gate_up", index).T).chunk(2, -1)
        return (torch.nn.functional.silu(gate) * up) @ dequantized(config, t, f"{prefix}down", index).T

    y = expert("shared_", 0, x)
    for n in range(len(rows)):
        for j in range(config.top_k):
            index = int(ids[rows[n], j])
            y[n] += weights[rows[n], j].double() * expert("", index, x[n : n + 1])[0]
    return y


def chosen(config: MoeConfig, t: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """The router in PyTorch: float64 logits, stable sorts."""
    logits = (t["x"].double() @ t["router_weight"].double().T).float()
    scores = torch.sigmoid(logits.double()).float()
    choice = scores + t["expert_bias"]
    groups = choice.view(len(choice), config.n_group, -1)
    total = groups.sort(dim=-1, descending=True, stable=True).values[..., :2].sum(-1)
    kept = total.sort(dim=-1, descending=True, stable=True).indices[..., : config.topk_group]
    stays = torch.zeros_like(total, dtype=torch.bool).scatter_(-1, kept, True)
    masked = groups.masked_fill(~stays[..., None], -torch.inf).flatten(1)
    ids = masked.sort(dim=-1, descending=True, stable=True).indices[:, : config.top_k]
    weights = scores.gather(1, ids).double()
    weights = weights / (weights.sum(-1, keepdim=True) + config.norm_eps) * config.routed_scaling_factor
    return ids, weights


def check(config: MoeConfig, call: Call, allowed: float) -> float:
    """Compares ids of all tokens and results of some with float64; the error."""
    ids, weights = chosen(config, call.tensors)
    tokens = len(ids)
    if not torch.equal(ids, call.outputs["expert_ids"]):
        wrong = (ids != call.outputs["expert_ids"]).any(-1).nonzero().flatten()
        raise SystemExit(f"expert ids of {len(wrong)} of {tokens} tokens are wrong, first {wrong[:4].tolist()}")
    rows = torch.arange(tokens, device=ids.device)[:: max(1, tokens // 12)][:16]
    want = truth(config, call.tensors, rows, ids, weights)
    error = float((call.outputs["y"][rows].double() - want).norm() / want.norm())
    if not error <= allowed:
        raise SystemExit(f"{config.weight_format}, {tokens} tokens: error {error:.2e}, allowed {allowed:.0e}")
    return error


def replayed(calls: list[Callable[[int], None]], times: int = 20) -> float:
    """Microseconds a call, replayed from a graph of all of them."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call(stream.cuda_stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call(stream.cuda_stream)
    found = []
    for _ in range(times):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) * 1e3 / len(calls))
    return statistics.median(found)


def timed(call: Callable[[int], None], times: int = 10) -> float:
    """Microseconds of a call by events."""
    stream = torch.cuda.current_stream().cuda_stream
    for _ in range(2):
        call(stream)
    found = []
    for _ in range(times):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call(stream)
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(found)


def profile(call: Callable[[int], None], times: int = 5) -> list[tuple[str, float]]:
    """Each kernel's mean microseconds."""
    stream = torch.cuda.current_stream().cuda_stream
    for _ in range(2):
        call(stream)
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as seen:
        for _ in range(times):
            call(stream)
        torch.cuda.synchronize()
    rows = [(e.key, float(e.self_device_time_total) / times) for e in seen.key_averages()]
    return [(name.replace("deltafuse::moe::", "").split("(deltafuse")[0][:90], us) for name, us in rows if us > 0]


class Bench:
    """The runs of one library; results are collected in ``results``."""

    def __init__(self, kernels: Kernels, show_kernels: bool) -> None:
        self.kernels, self.show_kernels = kernels, show_kernels
        self.results: list[dict[str, Any]] = []

    def note(self, **result: Any) -> None:
        self.results.append(result)
        print("  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in result.items()), flush=True)

    def call(self, form: str, weights: dict[str, torch.Tensor], layer: Layer, x: torch.Tensor) -> Call:
        return self.kernels.prepare(Call(FORMS[form], {**weights, "x": x}), layer)

    @staticmethod
    def allowed(config: MoeConfig) -> float:
        """Prompts with float8 weights, and what takes their kernels, have activations in float8 too."""
        return tolerance("cuda", "float8_activations" if config.weight_format == "float8" else "bfloat16")

    def small(self, form: str, weights: dict[str, torch.Tensor], layer: Layer, tokens: int) -> None:
        config = FORMS[form]
        rng = torch.Generator("cuda").manual_seed(tokens)
        calls = []
        for _ in range(8 if tokens > 1 else 32):
            x = torch.randn(tokens, config.hidden_size, generator=rng, device="cuda").bfloat16()
            calls.append(self.call(form, weights, layer, x))
        self.kernels.launch(calls[0], layer, torch.cuda.current_stream().cuda_stream)
        error = check(config, calls[0], self.allowed(config))
        used = statistics.mean(len(torch.unique(chosen(config, call.tensors)[0])) for call in calls)
        weights_read = (used + 1) * 3 * config.hidden_size * config.intermediate_size * BYTES_PER_WEIGHT[form]
        floor = (weights_read + 4 * config.num_experts * config.hidden_size) / COPY_BYTES_PER_S * 1e6
        spent = replayed([lambda s, c=call: self.kernels.launch(c, layer, s) for call in calls])  # type: ignore[misc]
        self.note(
            what="block",
            form=form,
            tokens=tokens,
            us=spent,
            limit_us=floor,
            fraction=floor / spent,
            experts=used,
            error=error,
        )
        if self.show_kernels:
            for name, us in profile(lambda s: self.kernels.launch(calls[0], layer, s)):
                print(f"    {us:9.2f} us  {name}")

    def prompt(self, form: str, weights: dict[str, torch.Tensor], layer: Layer, tokens: int) -> None:
        config = FORMS[form]
        x = torch.randn(tokens, config.hidden_size, generator=torch.Generator("cuda").manual_seed(7), device="cuda")
        call = self.call(form, weights, layer, x.bfloat16())
        self.kernels.launch(call, layer, torch.cuda.current_stream().cuda_stream)
        error = check(config, call, self.allowed(config))
        spent = timed(lambda s: self.kernels.launch(call, layer, s))
        # As other fused ops take it: logits come from outside.
        given = {name: tensor for name, tensor in call.tensors.items() if name != "router_weight"}
        given["router_logits"] = (call.tensors["x"].double() @ weights["router_weight"].double().T).float()
        without = self.kernels.prepare(Call(replace(config, has_router_weight=False), given), layer)
        self.kernels.launch(without, layer, torch.cuda.current_stream().cuda_stream)
        if not torch.equal(call.outputs["expert_ids"], without.outputs["expert_ids"]):
            raise SystemExit(f"{form}, {tokens} tokens: other experts where logits are given")
        spent_given = timed(lambda s: self.kernels.launch(without, layer, s))
        routed = 2.0 * tokens * config.top_k * 3 * config.hidden_size * config.intermediate_size
        flops = routed * (1 + 1 / config.top_k)
        read = config.num_experts * 3 * config.hidden_size * config.intermediate_size * BYTES_PER_WEIGHT[form]
        floor = max(flops / MATMUL_FLOPS[form], read / COPY_BYTES_PER_S) * 1e6
        self.note(
            what="block", form=form, tokens=tokens, us=spent, limit_us=floor, fraction=floor / spent,
            tflops=flops / spent / 1e6, tflops_without_shared=routed / spent / 1e6, error=error,
            us_logits_given=spent_given, tflops_logits_given=flops / spent_given / 1e6,
        )  # fmt: skip
        if self.show_kernels:
            for name, us in profile(lambda s: self.kernels.launch(call, layer, s)):
                print(f"    {us:9.2f} us  {name}")

    def peer(self, weights: dict[str, torch.Tensor], tokens: int) -> None:
        """QMoE beside ours, both with half the experts and no shared one; ours with the router, QMoE without."""
        try:
            from ort_peer import bind, qmoe_model
        except ImportError as missing:
            print(f"QMoE of ONNX Runtime: left out, {missing}")
            return
        config = replace(
            FORMS["int4:128"], num_experts=256, shared_intermediate_size=0, shared_format="float", shared_block_size=0
        )
        own = {k: x[:256] for k, x in weights.items() if not k.startswith("shared_")}
        for name in ("gate_up_scale", "down_scale"):
            own[name] = own[name].bfloat16().float()  # QMoE's scales are of the tokens' type
        x = torch.randn(tokens, config.hidden_size, generator=torch.Generator("cuda").manual_seed(9), device="cuda")
        call = Call(config, {**own, "x": x.bfloat16()})
        layer = self.kernels.layer(call)
        self.kernels.prepare(call, layer)
        self.kernels.launch(call, layer, torch.cuda.current_stream().cuda_stream)
        given = call.outputs["expert_weights"]
        shares = torch.full((tokens, 256), -1e4, device="cuda")
        shares.scatter_(1, call.outputs["expert_ids"], (given / given.amax(-1, keepdim=True)).log())
        arrays = {k: own[k].cpu().numpy() for k in ("gate_up_weight", "gate_up_scale", "down_weight", "down_scale")}
        output = torch.zeros_like(call.outputs["y"])
        try:
            model = qmoe_model(tokens, arrays, config.top_k, 128, "bfloat16")
            tensors = {"input": call.tensors["x"], "router_probs": shares.bfloat16()}
            run = bind(model, tensors, {"output": output})
            run()
            torch.cuda.synchronize()
        except Exception as failed:
            print(f"QMoE of ONNX Runtime, {tokens} tokens: left out, {str(failed)[:200]}")
            layer.close()
            return
        ours = call.outputs["y"].double()
        theirs_sum = output.double() * given.double().sum(-1, keepdim=True)
        error = float((theirs_sum - ours).norm() / ours.norm())
        if not error < 3e-2:
            print(f"QMoE of ONNX Runtime, {tokens} tokens: left out, its result is off ours by {error:.1e}")
            layer.close()
            return
        theirs = timed(lambda _: run())
        spent = timed(lambda s: self.kernels.launch(call, layer, s))
        self.note(
            what="launched, 256 experts",
            tokens=tokens,
            us=spent,
            ort_us=theirs,
            times_faster=theirs / spent,
            difference=error,
        )
        layer.close()

    def router(self, weights: dict[str, torch.Tensor], tokens: int) -> None:
        x = torch.randn(tokens, LING.hidden_size, generator=torch.Generator("cuda").manual_seed(3), device="cuda")
        given = {k: v for k, v in weights.items() if k in ("router_weight", "expert_bias")}
        call = Call(FORMS["int4:128"], {**given, "x": x.bfloat16()})
        self.kernels.route_only(call, 3, torch.cuda.current_stream().cuda_stream)
        if not torch.equal(chosen(LING, call.tensors)[0], call.outputs["expert_ids"]):
            raise SystemExit(f"router, {tokens} tokens: wrong expert ids")
        for what, steps in (("router, selection", 2), ("router, logits", 1)):
            spent = replayed([lambda s: self.kernels.route_only(call, steps, s)] * 20)  # noqa: B023
            self.note(what=what, tokens=tokens, us=spent)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", type=Path, default=None)
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--forms", default=",".join(FORMS), help="weight formats to run")
    parser.add_argument("--tokens", default="1,2,4,8,16,32,64,8192")
    parser.add_argument("--no-peers", dest="peers", action="store_false", help="ours alone")
    parser.add_argument("--kernels", action="store_true", help="each kernel's own time too")
    args = parser.parse_args()
    library = args.library or find_library()
    if library is None or not torch.cuda.is_available():
        print("bench_moe: no GPU here" if library else "bench_moe: no library; build the plugin or name --library")
        return 1
    bench = Bench(Kernels(library), args.kernels)
    for form in args.forms.split(","):
        weights = draw(form)
        layer = bench.kernels.layer(
            Call(FORMS[form], {**weights, "x": torch.zeros(1, LING.hidden_size).bfloat16().cuda()})
        )
        torch.cuda.synchronize()
        if form == "int4:128":
            for tokens in (1, 8, 8192):
                bench.router(weights, tokens)
        for tokens in map(int, args.tokens.split(",")):
            (bench.small if tokens <= 256 else bench.prompt)(form, weights, layer, tokens)
            if form == "int4:128" and args.peers:
                bench.peer(weights, tokens)
        layer.close()
        del weights
        torch.cuda.empty_cache()
    report = {
        "date": datetime.date.today().isoformat(),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "commit": subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False
        ).stdout.strip(),
        "results": bench.results,
    }
    if args.out is not None:
        args.out.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
