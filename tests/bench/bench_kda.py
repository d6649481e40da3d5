"""Times KDA's CUDA kernels beside flash-linear-attention and ONNX Runtime's GatedDeltaNet, numbers checked first.

    python tests/bench/bench_kda.py --library build/libdeltafuse_ep.so --out result.json

Needs a GPU and PyTorch. Peers that are not installed are said to be missing and left out. Times are medians: prompts by
CUDA events around one call, tokens by replaying a CUDA graph of many calls. "cold" token times rotate among states that
together are several times the L2 cache; "hot" ones use one state again and again.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import importlib.util
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from gpu.kda_runner import Call, KdaConfig, Kernels, find_library, tolerance

K = V = 128
LOWER_BOUND = -5.0
COPY_BYTES_PER_S = 4.3e12  # device copy and bf16 matmul of an H200 as measured; the floors are stated against these
MATMUL_FLOPS = 7.0e14

BASE = KdaConfig(
    1,
    1,
    K,
    V,
    K**-0.5,
    qk_l2norm="sum",
    gate_activation="sigmoid",
    lower_bound=LOWER_BOUND,
    beta_activation="sigmoid",
    has_dt_bias=True,
    has_initial_state=True,
    has_final_state=True,
)


@dataclass(frozen=True)
class Shape:
    """One problem: ``lengths`` of the sequences (equal ones make a dense batch unless ``ragged``)."""

    name: str
    lengths: tuple[int, ...]
    heads: int
    ragged: bool = False

    @property
    def tokens(self) -> int:
        return sum(self.lengths)


PROMPTS = (
    Shape("B1 T8192 H32", (8192,), 32),
    Shape("B1 T8192 H64", (8192,), 64),
    Shape("B1 T2048 H16", (2048,), 16),
    Shape("B1 T2048 H32", (2048,), 32),
    Shape("B1 T16384 H16", (16384,), 16),
    Shape("B1 T32768 H32", (32768,), 32),
    Shape("8 x 1024 H64", (1024,) * 8, 64, True),
    Shape("1300,547,2048,963,271,3063 H64", (1300, 547, 2048, 963, 271, 3063), 64, True),
)
TOKENS = (Shape("B1 H32", (1,), 32), Shape("B64 H32", (1,) * 64, 32), Shape("B256 H32", (1,) * 256, 32))


def draw(shape: Shape, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    """Operands as a model has them, on the device."""
    gen = torch.Generator(device="cuda").manual_seed(seed)
    rows = 1 if shape.ragged else len(shape.lengths)
    lead = (rows, shape.tokens // rows)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, device="cuda", generator=gen)

    x = {name: normal(*lead, shape.heads * K).to(dtype) for name in ("q", "k", "v")}
    x["g"] = (normal(*lead, shape.heads * K) * 1.5 - 1).to(dtype)
    x["beta"] = normal(*lead, shape.heads).to(dtype)
    x["A_log"] = torch.rand(shape.heads, device="cuda", generator=gen) * 2 - 1
    x["dt_bias"] = normal(shape.heads * K) * 0.5
    x["initial_state"] = normal(len(shape.lengths), shape.heads, K, V)
    if shape.ragged:
        bounds = [0]
        for length in shape.lengths:
            bounds.append(bounds[-1] + length)
        x["cu_seqlens"] = torch.tensor(bounds, device="cuda", dtype=torch.int64)
    return x


def config_of(shape: Shape) -> KdaConfig:
    return replace(BASE, num_heads=shape.heads, num_v_heads=shape.heads, has_cu_seqlens=shape.ragged)


def truth(shape: Shape, x: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs [tokens, H, V] and final states [N, H, K, V] of the recurrence in float64."""
    heads = shape.heads
    wide = {name: x[name].double().reshape(shape.tokens, heads, -1) for name in ("q", "k", "v", "g", "beta")}
    q, k = (y / torch.sqrt((y * y).sum(-1, keepdim=True) + BASE.l2norm_eps) for y in (wide["q"], wide["k"]))
    rate = x["A_log"].double().exp().reshape(heads, 1)
    decay = torch.exp(LOWER_BOUND * torch.sigmoid(rate * (wide["g"] + x["dt_bias"].double().reshape(heads, K))))
    beta = torch.sigmoid(wide["beta"])
    outputs, finals, start = torch.empty_like(wide["v"]), [], 0
    for n, length in enumerate(shape.lengths):
        state = x["initial_state"][n].double()
        for t in range(start, start + length):
            state = state * decay[t].unsqueeze(-1)
            read = torch.bmm(k[t].unsqueeze(1), state)
            state = torch.baddbmm(state, k[t].unsqueeze(2), beta[t].unsqueeze(-1) * (wide["v"][t].unsqueeze(1) - read))
            outputs[t] = BASE.scale * torch.bmm(q[t].unsqueeze(1), state).squeeze(1)
        finals.append(state)
        start += length
    return outputs, torch.stack(finals)


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    got = got.double().reshape(want.shape)
    if not bool(torch.isfinite(got).all()):
        return float("inf")
    return float((got - want).norm() / want.norm())


Runner = Callable[[dict[str, torch.Tensor]], tuple[torch.Tensor, torch.Tensor]]


class Ours:
    """The kernels of this repository."""

    name = "deltafuse"

    def __init__(self, library: Path) -> None:
        self.kernels = Kernels(library)

    def bind(self, shape: Shape, x: dict[str, torch.Tensor], in_place: bool = False) -> tuple[Callable[[], None], Call]:
        call = self.kernels.prepare(Call(config_of(shape), x, in_place=in_place))
        return lambda: self.kernels.launch(call, torch.cuda.current_stream().cuda_stream), call

    def run(self, shape: Shape, x: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        launch, call = self.bind(shape, x)
        launch()
        return call.outputs["o"], call.outputs["final_state"]


class Fla:
    """flash-linear-attention's Triton kernels."""

    name = "fla"

    def __init__(self) -> None:
        ops = importlib.import_module("fla.ops.kda")
        self.chunk = ops.chunk_kda
        self.step = importlib.import_module("fla.ops.kda.fused_recurrent").fused_recurrent_kda_fwd
        backend = "FlashKDA (flash_kda is installed)" if importlib.util.find_spec("flash_kda") else "Triton"
        self.backend = f"fla {importlib.import_module('fla').__version__}, {backend}"

    def _heads(self, shape: Shape, x: dict[str, torch.Tensor]) -> dict[str, Any]:
        lead = x["q"].shape[:2]
        heads: dict[str, Any] = {name: x[name].reshape(*lead, shape.heads, -1) for name in ("q", "k", "v", "g")}
        heads |= {"beta": x["beta"], "A_log": x["A_log"], "dt_bias": x["dt_bias"], "scale": BASE.scale}
        heads |= {"initial_state": x["initial_state"], "cu_seqlens": x.get("cu_seqlens"), "lower_bound": LOWER_BOUND}
        heads |= dict.fromkeys(("use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel"), True)
        return heads

    def bind(self, shape: Shape, x: dict[str, torch.Tensor]) -> Callable[[], Any]:
        heads = self._heads(shape, x)
        return lambda: self.chunk(**heads, output_final_state=True, safe_gate=True)

    def bind_step(self, shape: Shape, x: dict[str, torch.Tensor], in_place: bool = True) -> Callable[[], Any]:
        heads = self._heads(shape, x)
        out = torch.empty_like(heads["v"])
        return lambda: self.step(**heads, inplace_final_state=in_place, output_final_state=True, out=out)


class Ort:
    """ONNX Runtime's GatedDeltaNet on its CUDA EP."""

    name = "ort"

    def __init__(self) -> None:
        self.peer = importlib.import_module("ort_peer")
        self.backend = f"onnxruntime {importlib.import_module('onnxruntime').__version__}, CUDAExecutionProvider"

    def bind(self, shape: Shape, x: dict[str, torch.Tensor]) -> tuple[Callable[[], Any], dict[str, torch.Tensor]]:
        model = self.peer.gated_delta_net_model(
            shape.tokens, len(shape.lengths), shape.heads, K, BASE.scale, LOWER_BOUND, "bfloat16", shape.ragged
        )
        rows = (shape.tokens, shape.heads, K)
        tensors = {"query": x["q"], "key": x["k"], "value": x["v"], "decay": x["g"]}
        tensors = {name: tensor.reshape(rows) for name, tensor in tensors.items()}
        tensors["beta"] = x["beta"].reshape(rows[:2])
        if self.peer.has_gate():
            tensors |= {"a_log": x["A_log"], "dt_bias": x["dt_bias"]}
        else:  # made before the op, and not timed
            pre = x["g"].float().reshape(rows) + x["dt_bias"].reshape(1, shape.heads, K)
            tensors["decay"] = LOWER_BOUND * torch.sigmoid(x["A_log"].exp().reshape(1, -1, 1) * pre)
            tensors["beta"] = tensors["beta"].float()
        tensors["initial_state"] = x["initial_state"].transpose(-1, -2).contiguous()
        if shape.ragged:
            tensors["cu_seqlens"] = x["cu_seqlens"].int()
        outputs = {
            "output": torch.empty_like(tensors["value"]),
            "final_state": torch.empty_like(tensors["initial_state"]),
        }
        run = self.peer.bind(model, tensors, outputs)
        outputs["final_state"] = outputs["final_state"].transpose(-1, -2)
        return (lambda held=tensors: run()), outputs  # held: the operands live as long as the call


def bench_ort(ort: Ort, shapes: tuple[Shape, ...], rows: list[dict[str, Any]], repeats: int) -> None:
    """Adds ORT's errors and times to the rows of ``shapes``."""
    for shape, row in zip(shapes, rows, strict=True):
        checked = shape if shape.tokens <= 8192 else replace(shape, lengths=(4096,))
        x = draw(checked, seed=1)
        run, outputs = ort.bind(checked, x)
        run()
        row["errors"][ort.name] = check(
            ort.name, checked, (outputs["output"], outputs["final_state"]), truth(checked, x)
        )
        row["ms"][ort.name] = time_call(ort.bind(shape, draw(shape))[0], repeats)
        print(
            f"{shape.name}: ort {row['ms'][ort.name] * 1e3:.1f} us, error {max(row['errors'][ort.name].values()):.1e}"
        )


def time_call(run: Callable[[], Any], repeats: int) -> float:
    """Median milliseconds of one call, by events."""
    for _ in range(5):
        run()
    torch.cuda.synchronize()
    marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for start, stop in marks:
        start.record()
        run()
        stop.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(stop) for start, stop in marks)


def time_replayed(calls: list[Callable[[], Any]], repeats: int = 30) -> float:
    """Median milliseconds a call, of a CUDA graph that holds all of ``calls``."""
    for run in calls[:2]:
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for run in calls:
            run()
    return time_call(graph.replay, repeats) / len(calls)


def prompt_floor_ms(shape: Shape) -> float:
    """The larger of bytes over bandwidth and operations over the matrix rate (kda-math: 160 kFLOP a token and head)."""
    heads, tokens = shape.heads, shape.tokens
    data = tokens * heads * (5 * K * 2 + 2) + 8 * len(shape.lengths) * heads * K * V
    return max(data / COPY_BYTES_PER_S, 160e3 * tokens * heads / MATMUL_FLOPS) * 1e3


def step_floor_ms(shape: Shape) -> float:
    return len(shape.lengths) * shape.heads * (8 * K * V + 5 * K * 2 + 2) / COPY_BYTES_PER_S * 1e3


def check(
    name: str, shape: Shape, got: tuple[torch.Tensor, torch.Tensor], want: tuple[torch.Tensor, torch.Tensor]
) -> dict[str, float]:
    errors = {"o": relative(got[0], want[0]), "final_state": relative(got[1], want[1])}
    if name == Ours.name and max(errors.values()) > tolerance("cuda", "bfloat16"):
        raise SystemExit(f"{shape.name}: {name} is wrong, {errors}; no times are reported")
    return errors


def bench_prompts(ours: Ours, fla: Fla | None, shapes: tuple[Shape, ...], repeats: int) -> Iterator[dict[str, Any]]:
    for shape in shapes:
        checked = shape if shape.tokens <= 8192 else replace(shape, lengths=(4096,))
        x = draw(checked, seed=1)
        want = truth(checked, x)
        errors = {ours.name: check(ours.name, checked, ours.run(checked, x), want)}
        if fla is not None:
            errors[fla.name] = check(fla.name, checked, fla.bind(checked, x)(), want)
        x = draw(shape)
        launch, _ = ours.bind(shape, x)
        row: dict[str, Any] = {"shape": shape.name, "errors": errors, "checked_tokens": checked.tokens}
        row["ms"] = {ours.name: time_call(launch, repeats)}
        if fla is not None:
            # Its many launches from Python can take longer than its kernels: a replayed graph leaves them out.
            run = fla.bind(shape, x)
            row["fla_launched_ms"] = time_call(run, repeats)
            row["ms"][fla.name] = min(row["fla_launched_ms"], time_replayed([run], repeats))
        row["floor_ms"] = prompt_floor_ms(shape)
        show(row, ours.name)
        yield row


def bench_tokens(ours: Ours, fla: Fla | None, shapes: tuple[Shape, ...]) -> Iterator[dict[str, Any]]:
    for shape in shapes:
        state_bytes = 4 * len(shape.lengths) * shape.heads * K * V
        x = draw(shape, seed=2)
        want = truth(shape, x)
        errors = {ours.name: check(ours.name, shape, ours.run(shape, x), want)}
        if fla is not None:
            own = dict(x, initial_state=x["initial_state"].clone())
            errors[fla.name] = check(fla.name, shape, fla.bind_step(shape, own)(), want)
        row: dict[str, Any] = {"shape": shape.name, "errors": errors, "ms": {}, "floor_ms": step_floor_ms(shape)}
        for heat, sets in (("hot", 1), ("cold", max(2, int(4e8 // state_bytes)))):
            many = [dict(x, initial_state=x["initial_state"].clone()) for _ in range(sets)]
            count = max(20, sets)
            bound = [ours.bind(shape, own, in_place=True) for own in many]
            row["ms"][f"{ours.name} {heat}"] = time_replayed([bound[i % sets][0] for i in range(count)])
            if fla is not None:
                times = []
                for in_place in (True, False):  # the faster of its two ways counts
                    steps = [fla.bind_step(shape, own, in_place) for own in many]
                    times.append(time_replayed([steps[i % sets] for i in range(count)]))
                row["ms"][f"{fla.name} {heat}"] = min(times)
        show(row, f"{ours.name} cold")
        yield row


def show(row: dict[str, Any], mine: str) -> None:
    times = ", ".join(f"{name} {ms * 1e3:.1f} us" for name, ms in row["ms"].items())
    errors = ", ".join(f"{name} {max(e.values()):.1e}" for name, e in row["errors"].items())
    other = mine.replace(Ours.name, Fla.name)
    ratio = f", {row['ms'][other] / row['ms'][mine]:.2f}x as fast as {other}" if other in row["ms"] else ""
    share = row["floor_ms"] / row["ms"][mine]
    print(
        f"{row['shape']}: {times}{ratio}; {share:.0%} of the limit ({row['floor_ms'] * 1e3:.1f} us); errors {errors}",
        flush=True,
    )


def output_of(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def environment() -> dict[str, Any]:
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "gpu": torch.cuda.get_device_name(),
        "driver": output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": getattr(importlib.import_module("triton"), "__version__", "")
        if importlib.util.find_spec("triton")
        else "",
        "commit": output_of("git", "rev-parse", "--short", "HEAD"),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--library", type=Path, default=None, help="shared library with the kernels (default: the plugin's)"
    )
    parser.add_argument("--out", type=Path, default=None, help="write the figures to this JSON file")
    parser.add_argument("--peers", default="fla,ort", help="comma-separated: fla, ort")
    parser.add_argument("--quick", action="store_true", help="the first prompt and token shapes only")
    parser.add_argument("--commit", default="", help="commit to record where git is not there to ask")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("bench_kda: no GPU here, nothing to time")
        return 1
    library = args.library or find_library()
    if library is None:
        print("bench_kda: no library; build the plugin or give --library")
        return 1
    ours, fla = Ours(library), None
    result = environment()
    if args.commit:
        result["commit"] = args.commit
    if "fla" in args.peers:
        try:
            fla = Fla()
            result["fla"] = fla.backend
            print(f"peer: {fla.backend}")
        except ImportError as error:
            print(f"peer fla is missing ({error}): timed without it")
    ort = None
    if "ort" in args.peers:
        try:
            ort = Ort()
            result["ort"] = ort.backend
        except ImportError as error:
            print(f"peer ort is missing ({error}): timed without it")
    print(", ".join(f"{name} {value}" for name, value in result.items()))
    prompts, tokens = (PROMPTS[:1], TOKENS[:1]) if args.quick else (PROMPTS, TOKENS)
    result["tokens"], result["prompts"] = [], []

    def save() -> None:
        if args.out:
            args.out.write_text(json.dumps(result, indent=1) + "\n")

    with torch.no_grad():
        for row in bench_tokens(ours, fla, tokens):
            result["tokens"].append(row)
            save()
        for row in bench_prompts(ours, fla, prompts, 10 if args.quick else 20):
            result["prompts"].append(row)
            save()
        if ort is not None:
            try:
                bench_ort(ort, tokens, result["tokens"], 20)
                bench_ort(ort, prompts, result["prompts"], 5)
            except Exception as error:  # a peer's failure is a line of the report, whatever it raises
                print(f"peer ort left out: {error}")
        save()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
