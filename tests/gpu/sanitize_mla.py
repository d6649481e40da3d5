"""A small grid over all kernels of LatentAttention, to be run under compute-sanitizer.

    compute-sanitizer --tool racecheck --error-exitcode 9 python tests/gpu/sanitize_mla.py

Prints the worst relative error, so that a run also shows that the kernels did their work.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from gpu.mla_runner import Kernels, MlaConfig, draw_inputs, errors, find_library

REAL = MlaConfig(
    num_heads=2,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    kv_lora_rank=512,
    scale=192**-0.5,
    rope="half",
    gate_activation="sigmoid",
    cache="latent",
    has_kv_norm=True,
    has_position_ids=True,
    cos_width=64,
    has_past=True,
    has_present=True,
)
STATIC = replace(REAL, static_cache=True)
SMALL = replace(STATIC, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=7, kv_lora_rank=10, cos_width=2, scale=0.3)
#: (configuration, rows of the batch, tokens, cache, element type)
GRID = (
    (REAL, 1, 1, 700, "bfloat16"),
    (replace(STATIC, num_heads=20), 3, 2, 150, "float16"),
    (replace(STATIC, paged=True, has_mask=True), 2, 1, 96, "bfloat16"),
    (replace(STATIC, num_heads=40), 2, 1, 300, "bfloat16"),
    (replace(STATIC, cache_type="int8"), 2, 1, 150, "bfloat16"),
    (replace(STATIC, cache_type="float8"), 6, 1, 700, "bfloat16"),
    (replace(STATIC, cache_type="float8", paged=True), 1, 1, 96, "float16"),
    (replace(STATIC, packed_cache=True, has_q_scale=True), 2, 150, 200, "bfloat16"),
    (replace(STATIC, has_mask=True), 1, 140, 200, "bfloat16"),
    (replace(STATIC, cache="expanded"), 1, 140, 300, "float16"),
    (replace(STATIC, cache_type="int8"), 1, 40, 90, "bfloat16"),
    (replace(SMALL, has_mask=True), 2, 3, 20, "float32"),
    (replace(SMALL, cache="expanded"), 2, 3, 20, "bfloat16"),
    (replace(REAL, cache="none", has_past=False, has_present=False), 1, 20, 0, "float32"),
)


def main() -> int:
    library = find_library()
    if library is None:
        print("sanitize_mla: no library; set DELTAFUSE_MLA_LIBRARY")
        return 1
    kernels, worst = Kernels(library), 0.0
    for config, batch, tokens, past, dtype in GRID:
        inputs = draw_inputs(config, batch, tokens, past, np.random.default_rng(3), "normal", dtype)
        got = kernels.run(config, inputs, in_place=tokens != 2)
        worst = max(worst, *errors(config, inputs, got).values())
    print(f"{len(GRID)} calls, worst relative error {worst:.1e}")
    return 0 if worst < 1e-2 else 1


if __name__ == "__main__":
    raise SystemExit(main())
