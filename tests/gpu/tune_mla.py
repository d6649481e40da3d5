"""Times every way that decode may go about a shape, numbers first, and prints a table. One process, one GPU.

    python tests/gpu/tune_mla.py                                  # the shapes of NOTES.md, under a minute
    python tests/gpu/tune_mla.py --shape 16 4096 --heads 128
    python tests/gpu/tune_mla.py --shape 64 4096 --chapters 16 32 64

A way is a grain (what one block makes: a tile of 64 tokens, a section of tiles, a chapter of sections), the tiles of a
section and of a chapter, and the query rows of a block. "auto" is what the library chooses: where another way is
faster, the costs in plan_decode (mla_decode_sm90a.cu) are wrong. Ways of one shape give the same bits, but for other
tiles of a section or a chapter.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bench.bench_mla import (
    L2_BYTES,
    Step,
    cache_of,
    new_tokens,
    relative,
    time_replayed,
    truth,
    weights,
)

from gpu.mla_runner import Call, Kernels, find_library

SHAPES = (
    Step(64, 4096),
    Step(16, 4096),
    Step(1, 8192),
    Step(1, 32768),
    Step(8, 4096),
    Step(64, 4096, heads=64),
    Step(64, 4096, heads=128),
    Step(64, 4096, cache_type="int8"),
    Step(64, 4096, cache_type="float8"),
    Step(1, 8192, cache_type="int8"),
)
GRAINS = {0: "tiles", 1: "sections", 2: "chapters"}
Way = dict[str, int]


def ways_of(step: Step, args: argparse.Namespace) -> list[Way]:
    """The library's choice first."""
    wide = step.heads * step.new > 32 and step.cache_type == "same"
    ways: list[Way] = [{}]
    for rows, grain in itertools.product((64, 32) if wide else (32,), GRAINS):
        if rows == 64 and grain == 2:
            continue  # no registers for them
        usual = args.sections or [16 if rows == 64 else 8]
        sections, chapters = usual if grain == 1 else usual[:1], args.chapters if grain == 2 else args.chapters[:1]
        for section, chapter in itertools.product(sections, chapters):
            ways.append({"grain": grain, "rows": rows, "section_tiles": section, "chapter_tiles": chapter})
    return ways


def words(way: Way) -> str:
    if not way:
        return "auto"
    return f"{GRAINS[way['grain']]} ({way['section_tiles']}, {way['chapter_tiles']})  {way['rows']} rows"


def promising(step: Step, way: Way) -> bool:
    """Not what must be slow: few parts for a whole GPU, or a whole GPU's sums of single tiles."""
    if not way:
        return True
    tiles = step.batch * step.tokens // 64
    parts = tiles // {0: 1, 1: way["section_tiles"], 2: way["chapter_tiles"]}[way["grain"]]
    return parts >= 32 and (way["grain"] > 0 or tiles <= 1024)


def tune(kernels: Kernels, step: Step, ways: list[Way], repeats: int) -> list[tuple[float, Way]]:
    config = step.config()
    count = max(1, min(8, math.ceil(3 * L2_BYTES / step.cache_bytes())))
    operands = new_tokens(config, step.batch, step.new) | {"kv_b_weight": weights(config)}
    operands["cache_lengths"] = torch.full((step.batch,), step.tokens - step.new, dtype=torch.int32, device="cuda")
    caches = [operands | cache_of(step) for _ in range(count)]
    exact: torch.Tensor | None = None
    found = []
    for way in ways:
        kernels.choose(**way)
        calls = [kernels.prepare(Call(config, x, in_place=True), keep_weights=False) for x in caches]
        for call in calls:
            kernels.launch(call)
        torch.cuda.synchronize()
        if exact is None:
            exact = truth(step, caches[0], step.batch - 1)
        error = relative(calls[0].outputs["o"][-1], exact)
        if not error < 2e-2:
            print(f"  {words(way)}: WRONG, error {error:.1e}", flush=True)
        else:
            cold = [calls[i % count] for i in range(max(count, 8))]
            runs = [lambda c=c: kernels.launch(c, core=True) for c in cold]
            us = 1e3 * time_replayed(runs, repeats)
            whole = 1e3 * time_replayed([lambda c=c: kernels.launch(c) for c in cold], repeats)
            rate = step.cache_bytes() / us / 1e6
            print(f"  {words(way):32s} {us:7.2f} us  {rate:5.2f} TB/s  op {whole:7.2f} us  {error:.1e}", flush=True)
            found.append((us, way))
        for call in calls:
            kernels.release(call)
    kernels.choose()
    return sorted(found, key=lambda x: x[0])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", type=int, nargs=2, metavar=("BATCH", "TOKENS"))
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--new", type=int, default=1)
    parser.add_argument("--cache", default="same", choices=("same", "int8", "float8"))
    parser.add_argument(
        "--sections", type=int, nargs="+", default=[], help="tiles of a section, powers of two from 4 on"
    )
    parser.add_argument("--chapters", type=int, nargs="+", default=[32], help="tiles of a chapter, powers of two")
    parser.add_argument("--all", action="store_true", help="also ways that must be slow")
    parser.add_argument("--repeats", type=int, default=10)
    args = parser.parse_args()
    library = find_library()
    if library is None or not torch.cuda.is_available():
        print("tune_mla: skipped, no GPU or no library (DELTAFUSE_MLA_LIBRARY)")
        return 0
    torch.manual_seed(0)
    kernels = Kernels(library)
    shapes = SHAPES if args.shape is None else (Step(*args.shape, args.heads, args.new, args.cache),)
    began = time.perf_counter()
    wrong = 0
    for step in shapes:
        print(f"B{step.batch} x {step.tokens} H{step.heads} S{step.new} {step.cache_type}", flush=True)
        ways = ways_of(step, args)
        ways = ways if args.all else [way for way in ways if promising(step, way)]
        found = tune(kernels, step, ways, args.repeats)
        wrong += len(ways) - len(found)
        if found:
            print(f"  best: {words(found[0][1])}, {found[0][0]:.2f} us", flush=True)
        torch.cuda.empty_cache()
    print(f"{time.perf_counter() - began:.0f} s, {wrong} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
