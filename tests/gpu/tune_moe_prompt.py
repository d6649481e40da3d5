"""Times the ways that GroupedQMoE's prompts may be driven, numbers first, and prints tables.

    python tests/gpu/tune_moe_prompt.py                      # Ling-3.0-flash, 8192 tokens, four formats: under a minute
    python tests/gpu/tune_moe_prompt.py --form bf16 --kernels
    python tests/gpu/tune_moe_prompt.py --only tokens=96 --only stages=3,merge=0

A way is a set of PromptTuning's settings (custom_ops/moe/moe_launch.h); the first line of a table is the kernels' own
choice, which is compared with float64 before anything is timed. Every other way must give the same bits (of
fast_logits: the same ids). A table is
timed twice in turn: where the two times of a line differ, so much is noise. The router's logits come last, by the
bfloat16 tensor cores and in float64 throughout: their ids must be equal.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bench.bench_moe import FORMS, LING, check, chosen, draw, profile, timed

from gpu.moe_runner import Call, Kernels, Layer, find_library, tolerance

Way = dict[str, int]
DEFAULTS: Way = {
    "tokens": 0, "stages": 0, "dynamic": 1, "keep_weights": 0, "few": 32, "merge": 1, "by_size": 0, "fast_logits": 512,
}  # fmt: skip
WAYS: tuple[Way, ...] = (
    {},
    {"dynamic": 0},
    {"merge": 0},
    {"by_size": 1},
    {"keep_weights": 1},
    {"few": 0},
    {"few": 1024},
    {"stages": 2},
    {"stages": 3},
    {"tokens": 160},
    {"tokens": 128},
    {"tokens": 96},
    {"tokens": 64},
    {"fast_logits": 0},
)


def shown(way: Way) -> str:
    return ", ".join(f"{name} {value}" for name, value in way.items()) or "as it is"


def drive(kernels: Kernels, way: Way) -> None:
    for name, value in (DEFAULTS | way).items():
        kernels.tune(name, value)


def applies(form: str, way: Way) -> bool:
    """Settings that are what the format does anyway are left out."""
    most = {"int4:128": 128, "int8:128": 128, "fp8:128x128": 160}.get(form, 192)
    if form in ("bf16", "fp8:128x128") and "few" in way:
        return False
    return way.get("tokens", 0) < most


def tables(kernels: Kernels, form: str, tokens: int, ways: list[Way], show_kernels: bool) -> None:
    config, weights = FORMS[form], draw(form)
    x = torch.randn(tokens, config.hidden_size, generator=torch.Generator("cuda").manual_seed(7), device="cuda")
    call = Call(config, {**weights, "x": x.bfloat16()})
    layer: Layer = kernels.layer(call)
    stream = torch.cuda.current_stream().cuda_stream
    routed = 2.0 * tokens * config.top_k * 3 * config.hidden_size * config.intermediate_size
    ways = [way for way in ways if applies(form, way)]
    spent: list[list[float]] = [[] for _ in ways]
    first: dict[str, torch.Tensor] = {}
    for turn in range(2):
        for i, way in enumerate(ways):
            drive(kernels, way)
            kernels.prepare(call, layer)  # the workspace depends on some of the settings
            if turn == 0:
                kernels.launch(call, layer, stream)
                torch.cuda.synchronize()
                if not first:
                    eight = config.weight_format == "float8"
                    error = check(config, call, tolerance("cuda", "float8_activations" if eight else "bfloat16"))
                    first = {name: tensor.clone() for name, tensor in call.outputs.items()}
                    print(f"\n{form}, {tokens} tokens: error {error:.1e}")
                    print(f"{'us':>10}{'again':>10}  TFLOP/s  without shared")
                # Logits in float64 may be added up in another order: the choices are the same.
                for name in ("expert_ids",) if "fast_logits" in way else tuple(first):
                    if not torch.equal(call.outputs[name], first[name]):
                        raise SystemExit(f"{form}, {shown(way)}: {name} has other bits than the first way's")
            spent[i].append(timed(lambda s: kernels.launch(call, layer, s), 5))
    for way, times in zip(ways, spent, strict=True):
        flops = routed / min(times) / 1e6
        print(f"{times[0]:10.0f}{times[1]:10.0f}{flops * (1 + 1 / config.top_k):9.0f}{flops:9.0f}        {shown(way)}")
    drive(kernels, {})
    kernels.prepare(call, layer)
    if show_kernels:
        for name, us in profile(lambda s: kernels.launch(call, layer, s)):
            print(f"    {us:9.2f} us  {name}")
    layer.close()


def router(kernels: Kernels, tokens: int) -> None:
    rng = torch.Generator("cuda").manual_seed(3)
    x = torch.randn(tokens, LING.hidden_size, generator=rng, device="cuda").bfloat16()
    weight = torch.randn(LING.num_experts, LING.hidden_size, generator=rng, device="cuda") * LING.hidden_size**-0.5
    bias = 0.02 * torch.randn(LING.num_experts, generator=rng, device="cuda")
    print(f"\nlogits alone, {tokens} tokens")
    for way in ({}, {"fast_logits": 0}):
        drive(kernels, way)
        call = Call(FORMS["int4:128"], {"x": x, "router_weight": weight, "expert_bias": bias})
        kernels.route_only(call, 3, torch.cuda.current_stream().cuda_stream)
        if not torch.equal(chosen(LING, call.tensors)[0], call.outputs["expert_ids"]):
            raise SystemExit(f"router, {shown(way)}: wrong expert ids")
        spent = timed(lambda s, c=call: kernels.route_only(c, 1, s))  # type: ignore[misc]
        print(f"{spent:10.1f} us  {shown(way)}")
        for name, us in profile(lambda s, c=call: kernels.route_only(c, 1, s)):  # type: ignore[misc]
            print(f"    {us:9.2f} us  {name}")
    drive(kernels, {})


def parsed(text: str) -> Way:
    way = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        if name not in DEFAULTS:
            raise argparse.ArgumentTypeError(f"{name}: one of {', '.join(DEFAULTS)}")
        way[name] = int(value)
    return way


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", type=Path, default=None)
    parser.add_argument("--form", choices=list(FORMS), action="append", help="default: all")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--only", type=parsed, action="append", metavar="NAME=VALUE,..", help="these ways alone")
    parser.add_argument("--kernels", action="store_true", help="each kernel's own time too")
    args = parser.parse_args()
    library = args.library or find_library()
    if library is None or not torch.cuda.is_available():
        print(
            "tune_moe_prompt: no GPU here"
            if library
            else "tune_moe_prompt: no library; build the plugin or name --library"
        )
        return 1
    begin = time.monotonic()
    kernels = Kernels(library)
    router(kernels, args.tokens)
    for form in args.form or FORMS:
        tables(kernels, form, args.tokens, [{}, *args.only] if args.only else list(WAYS), args.kernels)
        torch.cuda.empty_cache()
    print(f"\n{time.monotonic() - begin:.0f} s")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
