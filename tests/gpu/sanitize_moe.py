"""A small grid over all GroupedQMoE kernels, to be run under compute-sanitizer (the tests' own grid would take hours).

    compute-sanitizer --tool racecheck --error-exitcode 9 python tests/gpu/sanitize_moe.py

Prints the worst relative error, so that a run also shows that the kernels did their work.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from gpu.moe_runner import Kernels, MoeConfig, draw_inputs, find_library, reference, relative_error

LAYER = MoeConfig(
    num_experts=8,
    top_k=2,
    hidden_size=136,
    intermediate_size=72,
    shared_intermediate_size=40,
    n_group=4,
    topk_group=2,
    block_size=128,
    shared_block_size=0,
    weight_format="int4",
    shared_format="int4",
    has_expert_bias=True,
    has_shared_gate=True,
    has_ids=True,
)
FLOAT8 = replace(LAYER, weight_format="float8", shared_format="float8")
#: (configuration, tokens, element type)
GRID = (
    (LAYER, 1, "bfloat16"),
    (LAYER, 9, "float16"),
    (replace(LAYER, block_size=32, has_zero_point=True, shared_format="float"), 3, "bfloat16"),
    (replace(LAYER, weight_format="int8", shared_format="int8", score_function="softmax"), 2, "bfloat16"),
    (FLOAT8, 2, "bfloat16"),
    (LAYER, 40, "bfloat16"),
    (replace(LAYER, weight_format="int8", shared_format="int8"), 70, "bfloat16"),
    (FLOAT8, 40, "bfloat16"),
    (replace(LAYER, weight_format="float", shared_format="float", block_size=0, activation="gelu"), 40, "float16"),
    (replace(LAYER, weight_format="float", shared_format="float", block_size=0, hidden_size=99), 40, "float32"),
    (replace(LAYER, gated=0, activation="relu2"), 40, "float32"),
    # logits by the bfloat16 tensor cores; the shared expert among the others
    (replace(LAYER, num_experts=40), 70, "bfloat16"),
    (replace(FLOAT8, num_experts=40, top_k=3, intermediate_size=136, shared_intermediate_size=136), 150, "bfloat16"),
    (replace(LAYER, weight_format="float", shared_format="float", block_size=0, num_experts=40), 150, "bfloat16"),
)


def main() -> int:
    library = find_library()
    if library is None:
        print("sanitize_moe: no library; set DELTAFUSE_MOE_LIBRARY")
        return 1
    kernels, worst = Kernels(library), 0.0
    kernels.tune("fast_logits", 1)  # on few tokens, too
    for config, tokens, dtype in GRID:
        inputs = draw_inputs(config, tokens, np.random.default_rng(3), "normal", dtype)
        want, got = reference(config, inputs), kernels.run(config, inputs)
        worst = max(worst, relative_error(got["y"], want["y"]))
        if not np.array_equal(got["expert_ids"], want["expert_ids"]):
            print(f"wrong expert ids: {config.overload()}, {tokens} tokens")
            return 1
    print(f"{len(GRID)} calls, worst relative error {worst:.1e}")
    return 0 if worst < 5e-2 else 1


if __name__ == "__main__":
    raise SystemExit(main())
