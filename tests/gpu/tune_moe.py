"""Times the ways that GroupedQMoE's calls of a few tokens may be driven, numbers first, and prints tables.

    python tests/gpu/tune_moe.py                          # Ling-3.0-flash in int4:128, under a minute
    python tests/gpu/tune_moe.py --form bf16 --tokens 1 8
    python tests/gpu/tune_moe.py --only split=4 --only first_blocks=1,split=1

A way is a set of DecodeTuning's settings (custom_ops/moe/moe_decode.h); the first line of a table is the kernels' own
choice. Every way's ids and results are compared with the first one's, and those with float64. Calls are replayed from
a graph of several with different tokens, so that their weights together are many times the L2, and the whole table is
timed twice in turn: where the two times of a line differ, so much is noise. The router alone comes last.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bench.bench_moe import COPY_BYTES_PER_S, FORMS, LING, check, chosen, draw, replayed

from gpu.moe_runner import Call, Kernels, Layer, find_library, tolerance

Way = dict[str, int]
ONE_TOKEN: tuple[Way, ...] = (
    {},
    {"dependent": 0},
    {"prefetch": 0},
    {"prefetch": 1},
    {"split": 1},
    {"split": 4},
    {"first_blocks": 2},
    {"first_threads": 256, "split": 4},
    {"first_threads": 256, "split": 2},
    {"first_threads": 256, "first_blocks": 2},
    {"second_threads": 128},
)
MORE_TOKENS: tuple[Way, ...] = (
    {},
    {"tokens": 0},
    {"dependent": 0},
    {"split": 1},
    {"split": 4},
    {"first_blocks": 1},
    {"first_threads": 256, "first_blocks": 1},
    {"first_threads": 256, "first_blocks": 3},
    {"first_threads": 256, "first_blocks": 4, "split": 1},
    {"many_threads": 128},
)


def parse(text: str) -> Way:
    """``"split=4,first_blocks=1"``."""
    return {name: int(value) for name, value in (part.split("=") for part in text.split(","))}


def shown(way: Way) -> str:
    if way == {"tokens": 0}:
        return "prompts' kernels"
    return ", ".join(f"{k} {v}" for k, v in way.items()) or "as they are"


class Tuner:
    """One form's layer."""

    def __init__(self, kernels: Kernels, form: str) -> None:
        self.kernels, self.form, self.config = kernels, form, FORMS[form]
        self.weights = draw(form)
        nothing = torch.zeros(1, LING.hidden_size, dtype=torch.bfloat16, device="cuda")
        self.layer: Layer = kernels.layer(Call(self.config, {**self.weights, "x": nothing}))
        torch.cuda.synchronize()

    def use(self, way: Way) -> None:
        self.kernels.tune("defaults", 0)
        for name, value in way.items():
            self.kernels.tune(f"decode_{name}", value)

    def calls(self, tokens: int) -> list[Call]:
        rng = torch.Generator("cuda").manual_seed(tokens)
        count = 32 if tokens == 1 else 8
        drawn = [torch.randn(tokens, LING.hidden_size, generator=rng, device="cuda").bfloat16() for _ in range(count)]
        return [Call(self.config, {**self.weights, "x": x}) for x in drawn]

    def time_ways(self, tokens: int, ways: tuple[Way, ...]) -> None:
        """Prints a table."""
        calls = self.calls(tokens)
        used = sum(len(torch.unique(chosen(self.config, call.tensors)[0])) for call in calls) / len(calls)
        per_weight = {"int4:128": 0.5 + 2 / 128, "int8:128": 1 + 2 / 128, "fp8:128x128": 1.0, "bf16": 2.0}[self.form]
        read = (used + 1) * 3 * LING.hidden_size * LING.intermediate_size * per_weight
        floor = (read + 4 * LING.num_experts * LING.hidden_size) / COPY_BYTES_PER_S * 1e6
        print(f"{self.form}, {tokens} tokens, {used:.1f} experts: {floor:.1f} us of bytes", flush=True)
        allowed = tolerance("cuda", "float8_activations" if self.form.startswith("fp8") else "bfloat16")
        first: torch.Tensor | None = None
        good: list[Way] = []
        for way in ways:
            self.use(way)
            for call in calls:
                self.kernels.prepare(call, self.layer)
            try:
                self.kernels.launch(calls[0], self.layer, torch.cuda.current_stream().cuda_stream)
                torch.cuda.synchronize()
                check(self.config, calls[0], allowed)
            except (RuntimeError, SystemExit) as failed:
                print(f"  {shown(way):44} {failed}")
                continue
            y = calls[0].outputs["y"].double()
            first = y if first is None else first
            if not float((y - first).norm() / first.norm()) < 1e-2:
                print(f"  {shown(way):44} differs from the first")
                continue
            good.append(way)
        times: list[list[float]] = [[] for _ in good]
        for _, (at, way) in itertools.product(range(2), enumerate(good)):
            self.use(way)
            for call in calls:
                self.kernels.prepare(call, self.layer)
            launches = [lambda s, c=call: self.kernels.launch(c, self.layer, s) for call in calls]
            times[at].append(replayed(launches, times=10))  # type: ignore[arg-type]
        for way, found in zip(good, times, strict=True):
            both = " ".join(f"{us:8.2f}" for us in found)
            print(f"  {shown(way):44} {both} us   {floor / min(found):.2f} of the limit", flush=True)
        self.use({})

    def time_router(self, tokens: int) -> None:
        given = {k: v for k, v in self.weights.items() if k in ("router_weight", "expert_bias")}
        x = torch.randn(tokens, LING.hidden_size, generator=torch.Generator("cuda").manual_seed(3), device="cuda")
        call = Call(FORMS["int4:128"], {**given, "x": x.bfloat16()})
        self.kernels.route_only(call, 3, torch.cuda.current_stream().cuda_stream)
        if not torch.equal(chosen(LING, call.tensors)[0], call.outputs["expert_ids"]):
            print(f"router, {tokens} tokens: wrong expert ids")
            return
        for what, steps in (("selection", 2), ("logits", 1)):
            spent = replayed([lambda s, n=steps: self.kernels.route_only(call, n, s)] * 20, times=10)  # type: ignore[misc]
            print(f"router, {tokens} tokens, {what:10} {spent:8.2f} us", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", type=Path, default=None)
    parser.add_argument("--form", default="int4:128", choices=list(FORMS))
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--only", type=parse, action="append", default=[], help="these ways beside the kernels' own")
    args = parser.parse_args()
    library = args.library or find_library()
    if library is None or not torch.cuda.is_available():
        print("tune_moe: no GPU here" if library else "tune_moe: no library; build the plugin or name --library")
        return 1
    begin = time.monotonic()
    tuner = Tuner(Kernels(library), args.form)
    for tokens in args.tokens:
        ways = ({}, *args.only) if args.only else ONE_TOKEN if tokens == 1 else MORE_TOKENS
        tuner.time_ways(tokens, ways)
    for tokens in (1, 8, 8192):
        tuner.time_router(tokens)
    print(f"{time.monotonic() - begin:.0f} s")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
