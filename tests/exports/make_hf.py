"""Exports by transformers' own ``OnnxExporter``, with and without its fusions for ORT.

Usage: ``python -m exports.make_hf [NAME ...]`` with torch and transformers; no names means all.
"""

from __future__ import annotations

import copy
import json
import lzma
import sys
import time
from collections.abc import Iterable
from typing import Any

import onnx
import onnx_ir as ir
import torch
from torch.utils import _pytree as pytree

from .make_transformers import renamed
from .pack import DATA, INDEX, pack, truth_file
from .processed import optimize_for_ort
from .torch_side import array, bailing, flat_cache, ids, kimi

MODELS = {"bailing": bailing, "kimi": kimi}


def call(model: torch.nn.Module, tokens: int, past: int) -> dict[str, Any]:
    """Arguments: a prompt, or tokens after a prompt."""
    made: dict[str, Any] = dict(input_ids=ids(tokens, seed=tokens), use_cache=True)
    if past:
        with torch.no_grad():
            made["cache"] = model(input_ids=ids(past, seed=3), use_cache=True).cache
    return made


def tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_flatten(tree)[0] if isinstance(leaf, torch.Tensor)]


def cases_of(model: torch.nn.Module, proto: onnx.ModelProto, pairs: Iterable[tuple[int, int]]) -> dict[str, Any]:
    """Inputs of so many tokens after so many others, and the model's own results, by the graph's names."""
    cases = {}
    for length, before in pairs:
        inputs = call(model, length, before)
        fed = dict(zip((i.name for i in proto.graph.input), map(array, tensors(inputs)), strict=True))
        with torch.no_grad():
            out = model(**copy.deepcopy(inputs))
        results = map(array, [out.logits, *flat_cache(out.cache)])
        cases[f"T{length}p{before}"] = fed, dict(zip((o.name for o in proto.graph.output), results, strict=True))
    return cases


def export_hf(name: str, family: str, tokens: int, past: int = 0, *, dynamic: bool, fusions: str | None = None) -> None:
    """Export and pack with PyTorch's outputs at several lengths as truth."""
    from transformers.exporters.exporter_onnx import OnnxConfig, OnnxExporter

    started = time.time()
    model = MODELS[family](experts="grouped_mm")
    config = OnnxConfig(dynamic=dynamic, ort_fusions=fusions)
    program = OnnxExporter().export(model, copy.deepcopy(call(model, tokens, past)), config=config).program
    proto = ir.to_proto(program)
    pairs = [(tokens, past)]
    if dynamic:
        pairs += [(tokens, 21)] if past else [(7, 0), (65, 0), (130, 0)]
    cases = cases_of(model, proto, pairs)
    shapes: dict[str, list[int | str]] = {}
    bindings: list[dict[str, int]] = [{}]
    if dynamic and past:
        for value in proto.graph.input:
            fixed: list[int | str] = list(cases[f"T{tokens}p{past}"][0][value.name].shape)
            shapes[value.name] = ["past" if size == past and axis == 2 else size for axis, size in enumerate(fixed)]
        bindings = [{"past": 9}, {"past": 21}]
    elif dynamic:
        proto = renamed("S")(proto)
        bindings = [{"S": 7}, {"S": 12}]
    pack(
        proto,
        name,
        made=f"transformers OnnxExporter, {family}, T {tokens}, past {past}, dynamic {dynamic}, ort_fusions {fusions}",
        kda=1,
        form="recurrent" if past else "chunked",
        bindings=bindings,
        beyond=[] if past or not dynamic else [{"S": 65}, {"S": 130}],
        shapes=shapes,
        truth=truth_file(name, cases),
        tags=("decode" if past else "prefill", "hf"),
    )
    print(f"{name}: {len(proto.graph.node)} nodes, {time.time() - started:.0f} s", flush=True)


def onnxscript_fused(name: str, source: str) -> None:
    """An export after onnxscript's ``optimize_for_ort``, kept because that takes long on a chunked prompt."""
    entry = json.loads(INDEX.read_text())[source]
    model = onnx.load_from_string(lzma.decompress((DATA / entry["file"]).read_bytes()))
    keep = ("kda", "form", "bindings", "beyond", "shapes", "truth", "loads", "tolerance")
    made = f"{entry['made']}; then onnxscript optimize_for_ort"
    pack(optimize_for_ort(model), name, made=made, tags=(*entry["tags"], "processed"), **{k: entry[k] for k in keep})


EXPORTS: dict[str, dict[str, Any]] = {
    "kimi_hf_decode_dyn": dict(family="kimi", tokens=1, past=9, dynamic=True),
    "bailing_hf_decode_ortcpu": dict(family="bailing", tokens=1, past=9, dynamic=False, fusions="cpu"),
    "kimi_hf_decode_dyn_ortcpu": dict(family="kimi", tokens=1, past=9, dynamic=True, fusions="cpu"),
    "bailing_hf_prefill_static_ortcpu": dict(family="bailing", tokens=12, dynamic=False, fusions="cpu"),
    "bailing_hf_prefill_dyn": dict(family="bailing", tokens=12, dynamic=True),
    "kimi_hf_prefill_dyn_ortcpu": dict(family="kimi", tokens=12, dynamic=True, fusions="cpu"),
}
FUSED = {"kimi_prefill_dyn_optimize_for_ort": "kimi_prefill_dyn", "hybrid4_prefill_optimize_for_ort": "hybrid4_prefill"}

if __name__ == "__main__":
    for wanted in sys.argv[1:] or [*EXPORTS, *FUSED]:
        if wanted in FUSED:
            onnxscript_fused(wanted, FUSED[wanted])
        else:
            export_hf(wanted, **EXPORTS[wanted])
