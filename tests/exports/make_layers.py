"""Exports of hand-written layers (``layer.py``): one file for each way to write them that matters.

Usage: ``python -m exports.make_layers [NAME ...]`` with torch; no names means all.
"""

from __future__ import annotations

import sys
from typing import Any

from torch.export import Dim

from .layer import Choice, Layer
from .make_transformers import renamed
from .torch_side import export, fill

FORMS = {
    "unrolled": "unrolled",
    "stacked": "unrolled",
    "scan": "scan",
    "while": "loop",
    "chunk": "chunked",
    "neumann": "chunked",
}
LAYERS: dict[str, dict[str, Any]] = {
    # prompts of any length
    "conv3_scan_silu_normalize": dict(
        choice=Choice(core="scan", gate="silu", l2="normalize", state="none"), tokens=7, dynamic="T"
    ),
    "conv3_scan_states_batch2": dict(
        choice=Choice(core="scan", step="einsum", conv_state=True), tokens=7, batch=2, dynamic="T"
    ),
    "conv3_scan_dynbatch_vfirst": dict(
        choice=Choice(core="scan", step="vfirst", decay="sigmoid"), tokens=7, batch=2, dynamic="BT"
    ),
    "while_batch2": dict(
        choice=Choice(core="while", step="matmul", conv="packed", decay="sigmoid"), tokens=7, batch=2, dynamic="T"
    ),
    "scan_gva_noopt": dict(choice=Choice(core="scan", H=2, HV=4, conv="packed"), tokens=7, dynamic="T", optimize=False),
    "scan_decay_input": dict(choice=Choice(core="scan", decay="input", conv="none", l2="div"), tokens=7, dynamic="T"),
    "scan_bare_op18": dict(
        choice=Choice(core="scan", conv="none", norm="none", gate="none", l2="none", step="matmul"),
        tokens=7,
        dynamic="T",
        opset=18,
    ),
    # one token
    "decode_conv3_native_op23": dict(
        choice=Choice(conv_state=True, norm="native", gate="silu", l2="normalize"), tokens=1, batch=2, opset=23
    ),
    "decode_gva_op24": dict(
        choice=Choice(H=2, HV=4, conv="packed", conv_state=True, step="matmul", norm="native"), tokens=1, opset=24
    ),
    "decode_bare": dict(choice=Choice(conv="none", norm="none", gate="none"), tokens=1),
    "decode_vfirst": dict(choice=Choice(step="vfirst", conv_state=True, decay="sigmoid"), tokens=1),
    "decode_householder": dict(choice=Choice(step="householder", conv="none"), tokens=1),
    "decode_wide_values": dict(
        choice=Choice(H=2, HV=2, K=8, V=12, step="einsum", conv_state=True, l2="div"), tokens=1, batch=2
    ),
    # frozen lengths
    "unrolled_gva_T4": dict(choice=Choice(H=2, HV=4, step="matmul"), tokens=4, batch=2),
    "stacked_T3_conv_bias": dict(
        choice=Choice(core="stacked", conv="packed", conv_bias=True, conv_state=True), tokens=3
    ),
    "stacked_T5_conv_linear_beta2": dict(
        choice=Choice(core="stacked", step="einsum", conv_silu=False, beta_scale=2.0, state="none"), tokens=5
    ),
    "chunk16_T32_beta2": dict(choice=Choice(core="chunk", beta_scale=2.0), tokens=32),
    "chunk64_T64": dict(choice=Choice(core="chunk", chunk=64, D=16, H=2, HV=2), tokens=64),
    "chunk16_T48_gva_nostate": dict(
        choice=Choice(core="chunk", H=2, HV=4, decay="sigmoid", state="none", gate="silu"), tokens=48
    ),
    "neumann16_T48": dict(choice=Choice(core="neumann", conv_state=True), tokens=48, batch=2),
    "neumann16_T16_op23": dict(choice=Choice(core="neumann", norm="native", state="out"), tokens=16, opset=23),
    # torch's older exporter
    "legacy_decode_op18": dict(choice=Choice(conv_state=True, l2="div"), tokens=1, opset=18, legacy=True),
    "legacy_stacked_T4_op18": dict(
        choice=Choice(core="stacked", decay="sigmoid", gate="silu"), tokens=4, opset=18, legacy=True
    ),
    "legacy_chunk16_T32_op20": dict(
        choice=Choice(core="chunk", conv="packed", state="none"), tokens=32, opset=20, legacy=True
    ),
    # float32 loses all digits of this inverse for nearly collinear keys: refusing to call it KDA is right
    "neumann32_T32": dict(
        choice=Choice(core="neumann", chunk=32), tokens=32, kda=0, tags=("layer", "prefill", "unstable")
    ),
}


def make(name: str, choice: Choice, tokens: int, batch: int = 1, dynamic: str = "", **options: Any) -> None:
    """Export one. ``dynamic`` names the symbolic axes of x, of its fellows in time, and of the states' batch."""
    layer = fill(Layer(choice), seed=len(name))
    assert isinstance(layer, Layer)
    extra = layer.extra_names()
    spec: Any = None
    bindings: list[dict[str, int]] = [{}]
    after = None
    if dynamic:
        axes = {"B": 0, "T": 1}
        along = {axes[a]: Dim.DYNAMIC for a in dynamic}
        states = {0: Dim.DYNAMIC} if "B" in dynamic else None
        if "log_decay" in extra:
            along = {1: Dim("T", min=1, max=4096)}
        spec = (along, tuple(along if n == "log_decay" else states for n in extra)) if extra else (along,)
        after = renamed(*dynamic)
        bindings = [
            {"T": t} if dynamic == "T" else {"T": t, "B": b} for t, b in ((1, 3), (5, 1), (7, 2), (33, 2), (80, 1))
        ]
    options.setdefault("kda", 1)
    options.setdefault("tags", ("layer", "decode" if tokens == 1 else "prefill"))
    export(
        layer,
        layer.example(tokens, batch),
        name,
        dynamic=spec,
        names=(["x", *extra], layer.output_names()),
        after=after,
        made=f"hand-written layer, T {dynamic or tokens}, batch {batch}: {choice}",
        form="recurrent" if tokens == 1 else FORMS[choice.core],
        bindings=bindings,
        **options,
    )


def self_check() -> None:
    """Every spelling of the recurrence gives the same numbers."""
    import torch

    for tokens, spellings in ((32, ("chunk", "neumann", "scan", "while", "stacked")), (3, ("unrolled", "stacked"))):
        results = {}
        for core in spellings:
            for step in (
                ("outer",) if core in ("chunk", "neumann") else ("outer", "einsum", "matmul", "householder", "vfirst")
            ):
                layer = fill(Layer(Choice(core=core, step=step)))
                x, state = layer.example(tokens)
                with torch.no_grad():
                    results[core, step] = layer(x, 0 * state)[0]
        first = next(iter(results.values()))
        for key, value in results.items():
            print(key, f"{float((value - first).norm() / first.norm()):.1e}")


if __name__ == "__main__":
    if sys.argv[1:] == ["check"]:
        self_check()
    else:
        for wanted in sys.argv[1:] or LAYERS:
            make(wanted, **LAYERS[wanted])
