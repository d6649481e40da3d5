"""Put an export into ``tests/data``: rounded weights, no stack traces, xz, and an entry in ``expected.json``."""

from __future__ import annotations

import json
import lzma
import os
from pathlib import Path
from typing import Any

import numpy as np
import onnx

DATA = Path(__file__).resolve().parents[1] / "data"
INDEX = DATA / "expected.json"
#: Tracebacks name the maker's machine and quote other people's code; nothing reads them.
DROPPED_METADATA = ("pkg.torch.onnx.stack_trace",)


#: Nothing but reports reads these; without them many small exports stay small.
_LONG_METADATA = ("pkg.torch.onnx.class_hierarchy", "pkg.torch.onnx.fx_node", "namespace")


def lean(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with the scopes of its nodes and no other metadata of them; changed in place."""
    for node in model.graph.node:
        kept = [p for p in node.metadata_props if p.key not in _LONG_METADATA]
        del node.metadata_props[:]
        node.metadata_props.extend(kept)
    for value in model.graph.value_info:
        del value.metadata_props[:]
    return model


def scrub(model: onnx.ModelProto) -> None:
    """Drop stack traces from every node, subgraph and function, in place."""

    def nodes(items: Any) -> None:
        for node in items:
            kept = [p for p in node.metadata_props if p.key not in DROPPED_METADATA]
            if len(kept) != len(node.metadata_props):
                del node.metadata_props[:]
                node.metadata_props.extend(kept)
            for attribute in node.attribute:
                if attribute.HasField("g"):
                    nodes(attribute.g.node)

    nodes(model.graph.node)
    for function in model.functions:
        nodes(function.node)


def truth_file(name: str, cases: dict[str, tuple[dict[str, np.ndarray], dict[str, np.ndarray]]]) -> str:
    """Save inputs and true outputs of each case; the arrays are ``<case>|in|<name>`` and ``<case>|out|<name>``."""
    arrays: dict[str, Any] = {}
    for case, (inputs, outputs) in cases.items():
        arrays.update({f"{case}|in|{key}": value for key, value in inputs.items()})
        arrays.update({f"{case}|out|{key}": value for key, value in outputs.items()})
    np.savez_compressed(DATA / f"{name}.truth.npz", **arrays)
    return f"{name}.truth.npz"


def pack(
    model: onnx.ModelProto,
    name: str,
    *,
    made: str,
    kda: int,
    moe: int = 0,
    mla: int = 0,
    form: str = "",
    bindings: list[dict[str, int]] | None = None,
    beyond: list[dict[str, int]] | None = None,
    shapes: dict[str, list[int | str]] | None = None,
    truth: str = "",
    loads: bool = True,
    tolerance: float = 1e-4,
    tags: tuple[str, ...] = (),
) -> None:
    """Write ``<name>.onnx.xz`` and its entry; with ``DELTAFUSE_RAW_EXPORTS`` set, the plain file into that folder too.

    Args:
        model: the export; changed in place by :func:`scrub`.
        made: how it was made, in words.
        kda: how many KDA layers it holds.
        moe: how many mixtures of experts.
        mla: how many latent attentions.
        form: how the recurrence is written: chunked, recurrent, unrolled, scan, loop, linear-attention.
        bindings: values of the symbolic dimensions at which the unfused model gives right results in ORT.
        beyond: values at which only the fused model can be right.
        shapes: input shapes to use instead of the graph's own, where an exporter wrote more symbols than are free.
        truth: file of :func:`truth_file`.
        loads: does stock ORT load the unfused model?
        tolerance: largest relative L2 difference of the fused model's outputs.
    """
    scrub(model)
    raw = model.SerializeToString()
    (DATA / f"{name}.onnx.xz").write_bytes(lzma.compress(raw, preset=9 | lzma.PRESET_EXTREME))
    folder = os.environ.get("DELTAFUSE_RAW_EXPORTS")
    if folder:
        Path(folder, f"{name}.onnx").write_bytes(raw)
    index: dict[str, Any] = json.loads(INDEX.read_text()) if INDEX.exists() else {}
    index[name] = {
        "file": f"{name}.onnx.xz",
        "made": made,
        "opset": next(o.version for o in model.opset_import if o.domain in ("", "ai.onnx")),
        "nodes": len(model.graph.node),
        "kda": kda,
        "moe": moe,
        "mla": mla,
        "form": form,
        "bindings": bindings or [{}],
        "beyond": beyond or [],
        "shapes": shapes or {},
        "truth": truth,
        "loads": loads,
        "tolerance": tolerance,
        "tags": list(tags),
    }
    INDEX.write_text(json.dumps(dict(sorted(index.items())), indent=1) + "\n")
