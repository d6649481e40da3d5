"""Latent attention by transformers' own ``OnnxExporter``: it alone exports rotations by complex numbers.

Usage: ``python -m exports.make_mla_hf [NAME ...]`` with torch and transformers; no names means all.
"""

from __future__ import annotations

import copy
import sys
from typing import Any

import onnx_ir as ir

from .make_hf import call, cases_of
from .make_transformers import renamed
from .pack import pack, truth_file
from .torch_mla import mla


def export_mla(name: str, family: str, tokens: int, past: int = 0, fusions: str | None = None, **changes: Any) -> None:
    """A prompt of any length, or one token on a cache of any length."""
    from transformers.exporters.exporter_onnx import OnnxConfig, OnnxExporter

    model = mla(family, **changes)
    config = OnnxConfig(dynamic=True, ort_fusions=fusions)
    program = OnnxExporter().export(model, copy.deepcopy(call(model, tokens, past)), config=config).program
    proto = ir.to_proto(program)
    cases = cases_of(model, proto, [(tokens, past), (tokens, 21) if past else (30, 0)])
    shapes: dict[str, list[int | str]] = {}
    for value in proto.graph.input if past else ():
        fixed: list[int | str] = list(cases[f"T{tokens}p{past}"][0][value.name].shape)
        shapes[value.name] = ["past" if size == past and axis == 2 else size for axis, size in enumerate(fixed)]
    if not past:
        proto = renamed("S")(proto)
    pack(
        proto,
        name,
        made=f"{family}, one layer, by transformers' OnnxExporter, T {tokens}, past {past}, ort_fusions {fusions}"
        + "".join(f", {k} {v}" for k, v in changes.items()),
        kda=0,
        mla=1,
        bindings=[{"past": 9}, {"past": 21}] if past else [{"S": 5}, {"S": 40}],
        shapes=shapes,
        truth=truth_file(name, cases),
        tags=("mla", "decode" if past else "prefill", "hf"),
    )
    print(f"{name}: {len(proto.graph.node)} nodes", flush=True)


EXPORTS: dict[str, dict[str, Any]] = {
    "mla_deepseek_v2_hf": dict(family="deepseek_v2", tokens=12),
    "mla_deepseek_v2_hf_eager_decode": dict(family="deepseek_v2", tokens=1, past=9, attention="eager"),
}

if __name__ == "__main__":
    for wanted in sys.argv[1:] or EXPORTS:
        export_mla(wanted, **EXPORTS[wanted])
