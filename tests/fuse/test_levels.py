"""Fused models in stock ONNX Runtime at every level of optimisation, with sizes free, made known later, or known from
the start. ONNX Runtime has crashed on a body whose branches it could choose (custom_ops/mla/body.py says when), so each
group runs in a process of its own."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from deltafuse.custom_ops.mla.draw import draw_inputs
from deltafuse.fusions.pipeline import fuse_model
from exports import library
from mla.configs import CONFIGS
from mla.onnx_call import call_model
from onnxruntime.tools.onnx_model_utils import make_dim_param_fixed

from . import kit

#: Of each op and each form of its body: free sizes, caches of all kinds, all three ops in one model.
EXPORTS = (
    *("bailing_dynbatch_prefill", "kimi_prefill_dyn", "kda_while_dynT", "bailing_wrap_decode_dyn_batched"),
    *("mla_deepseek_v3_prefill", "mla_latent_piece", "mla_packed_piece", "mla_expanded", "mla_static", "mla_half"),
    *("moe_stacked_dyn", "moe_gather_dynbatch", "hybrid4_prefill", "hybrid4_decode"),
)
#: Loads each model at each level, and runs it where there are feeds; the last line that it prints is what it was at.
SCRIPT = """
    import sys
    from pathlib import Path
    import numpy as np
    import onnxruntime as ort

    for path in sorted(Path(sys.argv[1]).glob("*.onnx")):
        case = path.with_suffix(".npz")
        arrays = dict(np.load(case)) if case.exists() else {}
        sizes = {n[5:]: int(a) for n, a in arrays.items() if n.startswith("size|")}
        for level in (0, 1, 2, 99):
            print(path.stem, "level", level, flush=True)
            options = ort.SessionOptions()
            options.log_severity_level, options.intra_op_num_threads = 4, 1
            options.graph_optimization_level = ort.GraphOptimizationLevel(level)
            for name, size in sizes.items():
                options.add_free_dimension_override_by_name(name, size)
            running = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
            if not arrays:
                continue
            running.disable_fallback()
            got = running.run(None, {v.name: arrays[f"in|{v.name}"] for v in running.get_inputs()})
            for value, result in zip(running.get_outputs(), got, strict=True):
                truth = arrays[f"out|{value.name}"].astype(np.float64)
                lost = np.linalg.norm(result.astype(np.float64) - truth) / max(np.linalg.norm(truth), 1e-12)
                assert result.shape == truth.shape and lost <= float(arrays["tolerance"]), (value.name, lost)
    print("all", flush=True)
"""


def check(folder: Path) -> None:
    """Runs :data:`SCRIPT` over a folder of models."""
    command = [sys.executable, "-c", textwrap.dedent(SCRIPT), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    at = done.stdout.splitlines()[-1:] or ["the start"]
    assert done.returncode == 0 and at == ["all"], f"exit {done.returncode} at {at[0]}\n{done.stderr[-2000:]}"


def fixed(model: onnx.ModelProto, sizes: dict[str, int]) -> onnx.ModelProto:
    """The model as onnxruntime.tools makes it where somebody gives its sizes numbers."""
    made = onnx.ModelProto()
    made.CopyFrom(model)
    for name, size in sizes.items():
        make_dim_param_fixed(made.graph, name, size)
    return made


@pytest.mark.parametrize("name", EXPORTS)
def test_every_level_gives_the_same(name: str, tmp_path: Path) -> None:
    export = library.export(name)
    before, _, after = kit.fused(name)
    for number, sizes in enumerate(export.bindings[:2]):
        feeds = export.feeds(sizes)
        arrays = {f"in|{n}": x for n, x in feeds.items()}
        arrays |= {f"out|{n}": x for n, x in library.run(library.session(before), feeds).items()}
        arrays["tolerance"] = np.array(export.tolerance)
        forms = {"free": after}
        if sizes:
            forms |= {"fixed": fixed(after, sizes), "overridden": after}
        for form, model in forms.items():
            path = tmp_path / f"{number}-{form}.onnx"
            onnx.save(model, path)
            given = {f"size|{n}": np.array(x) for n, x in sizes.items()} if form == "overridden" else {}
            np.savez(path.with_suffix(".npz"), **arrays, **given)  # type: ignore[arg-type]
    check(tmp_path)


def test_long_prompts_of_known_length_load(tmp_path: Path) -> None:
    """The general body of latent attention, with sizes by which every branch can be chosen."""
    for name in ("full", "no-cache", "fresh-latent", "expanded", "static", "paged", "float8-static"):
        config = CONFIGS[name]
        inputs = draw_inputs(config, 1, 600, 610, np.random.default_rng(0))
        onnx.save(call_model(config, inputs, dynamic=False), tmp_path / f"{name}.onnx")
    check(tmp_path)


def test_a_layer_of_real_size_loads(tmp_path: Path) -> None:
    """Frozen at 2048 tokens: no branch is left in the body."""
    layer = ir.from_proto(library.real_layer("mla_2048", zeros=True))
    report = fuse_model(layer, verify=False)
    assert report.count("mla") == 1 and report.model is not None
    for function in report.model.functions.values():
        assert "If" not in {node.op_type for node in ir.traversal.RecursiveGraphIterator(function.graph)}
    ir.save(report.model, tmp_path / "layer.onnx")
    check(tmp_path)
