"""A small grid over all KDA kernels, to be run under compute-sanitizer (the tests' own grid would take hours there).

    compute-sanitizer --tool racecheck --error-exitcode 9 python tests/gpu/sanitize_kda.py

Prints the worst relative error, so that a run also shows that the kernels did their work.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from gpu.kda_runner import KdaConfig, Kernels, draw_inputs, find_library, reference, relative_error

LAYER = KdaConfig(
    num_heads=1,
    num_v_heads=1,
    head_dim=64,
    head_v_dim=64,
    scale=0.125,
    qk_l2norm="sum",
    gate_activation="sigmoid",
    beta_activation="sigmoid",
    conv_activation="silu",
    output_gate="sigmoid",
    conv_width=4,
    conv_state_width=3,
    has_dt_bias=True,
    has_conv_bias=True,
    has_conv_state=True,
    has_initial_state=True,
    has_norm=True,
    has_present_conv_state=True,
    has_final_state=True,
)
#: (configuration, sequences, tokens, element type, in place)
GRID = (
    (LAYER, 2, 1, "bfloat16", True),
    (replace(LAYER, head_dim=128, head_v_dim=192, state_layout="VK"), 1, 1, "float16", True),
    (replace(LAYER, head_dim=128, head_v_dim=256), 1, 1, "float32", False),
    (replace(LAYER, num_v_heads=2), 1, 1, "bfloat16", True),
    (LAYER, 1, 210, "bfloat16", True),
    (replace(LAYER, head_dim=128, head_v_dim=128, gate_activation="softplus"), 1, 130, "float16", False),
    (replace(LAYER, num_v_heads=2, state_layout="VK", qk_l2norm="max"), 1, 65, "float32", False),
    (replace(LAYER, head_dim=192, head_v_dim=64), 1, 70, "bfloat16", False),
    (replace(LAYER, head_dim=256, head_v_dim=64), 1, 70, "bfloat16", False),
    (replace(LAYER, head_dim=256, head_v_dim=64, conv_width=0, conv_activation="none", has_conv_bias=False,
             has_conv_state=False, has_present_conv_state=False, conv_state_width=0), 1, 70, "float32", False),
    (replace(LAYER, has_cu_seqlens=True), 4, 150, "bfloat16", True),
)  # fmt: skip


def main() -> int:
    library = find_library()
    if library is None:
        print("sanitize_kda: no library; set DELTAFUSE_KDA_LIBRARY")
        return 1
    kernels, worst = Kernels(library), 0.0
    for config, sequences, tokens, dtype, in_place in GRID:
        case = "ragged" if config.has_cu_seqlens else "normal"
        inputs = draw_inputs(config, sequences, tokens, np.random.default_rng(3), case, dtype)
        want = reference(config, inputs)
        got = kernels.run(config, inputs, in_place=in_place)
        worst = max(worst, *(relative_error(x, want[name]) for name, x in got.items()))
    print(f"{len(GRID)} calls, worst relative error {worst:.1e}")
    return 0 if worst < 1e-2 else 1


if __name__ == "__main__":
    raise SystemExit(main())
