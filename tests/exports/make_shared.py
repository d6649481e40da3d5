"""Repack the shared archive of exports (``graphs.tar.xz``, unpacked) and the real-size layers.

Usage: ``python -m exports.make_shared FOLDER_OF_GRAPHS FOLDER_OF_LAYERS``. Needs no torch.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import numpy as np
import onnx

from .pack import DATA, pack, truth_file

PAST = [{"past": 9}, {"past": 21}]
GROUPED = "transformers 5.24 OnnxExporter, experts grouped_mm, dynamic cache"
PLAIN = "torch.onnx.export of BailingHybridForCausalLM, 1 KDA and 1 MLA layer"
HAND = "torch.onnx.export of a hand-written layer, three convolutions"
BAILING_CACHE: dict[str, list[int | str]] = {
    "input.cache.layers.0.conv_states.0": [1, 192, 4],
    "input.cache.layers.1.keys": [1, 1, "s8", 32],
    "input.cache.layers.1.values": [1, 1, "s8", 8],
}


def main(graphs: Path, layers: Path) -> None:
    """Write the packed files and their entries."""

    def add(name: str, **entry: object) -> None:
        pack(onnx.load(graphs / f"{name}.onnx"), name, **entry)  # type: ignore[arg-type]

    with np.load(graphs / "bailing_prefill_dynauto_batched.truth.npz") as z:
        cases = {
            f"T{t}": ({"input_ids": z[f"ids_{t}"]}, {"linear_19": z[f"logits_{t}"]}) for t in (10, 60, 64, 65, 100, 200)
        }
    truth = truth_file("bailing_prefill_dynauto_batched", cases)
    shared = ("shared", "transformers")
    add("bailing_prefill_static_batched", made=f"{PLAIN}, T 10", kda=1, form="chunked", tags=(*shared, "prefill"))
    add("bailing_prefill_static_T130", made=f"{PLAIN}, T 130", kda=1, form="chunked", tags=(*shared, "prefill"))
    add("bailing_prefill_static_op23", made=f"{PLAIN}, T 10", kda=1, form="chunked", tags=(*shared, "prefill"))
    add(
        "bailing_prefill_dynauto_batched",
        made=f"{PLAIN}, Dim.AUTO",
        kda=1,
        form="chunked",
        bindings=[{"s70": t} for t in (2, 10, 33, 64)],
        beyond=[{"s70": t} for t in (65, 100, 200)],
        truth=truth,
        tags=(*shared, "prefill"),
    )
    decode = dict(kda=1, form="recurrent", bindings=PAST)
    for name in ("bailing_wrap_decode_dyn_batched", "bailing_wrap_decode_dyn_batched_op23"):
        add(name, made=f"{PLAIN}, one token, states in and out", **decode, tags=(*shared, "decode"))
    add(
        "bailing_wrap_decode_f16_op20",
        made=f"{PLAIN}, float16, one token, states in and out",
        **decode,
        tolerance=5e-3,
        tags=(*shared, "decode", "float16"),
    )
    add(
        "bailing_hf_decode_dyn_grouped_mm",
        made=GROUPED,
        kda=1,
        form="recurrent",
        bindings=[{"s8": 9}, {"s8": 21}],
        shapes=BAILING_CACHE,
        tags=(*shared, "decode"),
    )
    add("kda_stack_T8", made=f"{HAND}, unrolled, stacked", kda=1, form="unrolled", tags=("shared", "layer"))
    add("kda_loop_T8", made=f"{HAND}, unrolled, slice assignment", kda=1, form="unrolled", tags=("shared", "layer"))
    lengths = [{"s27": t} for t in (1, 5, 8, 33, 100)]
    add("kda_scan_dynT", made=f"{HAND}, torch scan", kda=1, form="scan", bindings=lengths, tags=("shared", "layer"))
    add(
        "kda_while_dynT",
        made=f"{HAND}, torch while_loop",
        kda=1,
        form="loop",
        bindings=lengths,
        tags=("shared", "layer"),
    )
    add("kda_decode_T1", made=f"{HAND}, one token, states", kda=1, form="recurrent", tags=("shared", "layer", "decode"))
    none = dict(kda=0, tags=("shared", "no-kda"))
    add("dsv3_wrap_decode_dyn_batched", made="DeepSeek-V3, one token", bindings=PAST, **none)
    add("dsv3_prefill_dyn_batched_op23", made="DeepSeek-V3", bindings=[{"s70": 5}, {"s70": 23}], **none)
    add("mla_hub_sdpa_latent", made="hand-written MLA", bindings=[{"s62": 7}], shapes={"pos": [1, 1]}, **none)
    add("moe_stacked_dyn", made="hand-written MoE", bindings=[{"S": 6}], **none)
    for name in ("kda_512", "kda_2048"):
        shutil.copyfile(layers / f"{name}.skel.onnx.xz", DATA / f"{name}.skel.onnx.xz")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
