"""The face with the real pipeline: real exports in, fused models out, as files and in memory."""

from __future__ import annotations

import json
import lzma
import subprocess
import sys
from pathlib import Path

import deltafuse
import numpy as np
import onnx
import onnx_graphsurgeon as gs
import onnx_ir as ir
import onnxruntime as ort
import pytest

DATA = Path(__file__).resolve().parents[1] / "data"


def unpack(name: str) -> bytes:
    return lzma.decompress((DATA / f"{name}.onnx.xz").read_bytes())


@pytest.fixture(scope="module")
def decode() -> onnx.ModelProto:
    return onnx.ModelProto.FromString(unpack("bailing_wrap_decode_dyn_batched"))


def feeds(seed: int = 0) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(seed)
    shapes = {"flat_0": (1, 192, 4), "flat_1": (1, 4, 16, 16), "flat_2": (1, 1, 5, 32), "flat_3": (1, 1, 5, 8)}
    states = {name: 0.3 * draw.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    return {"input_ids": np.array([[7]]), **states}


def run(model: onnx.ModelProto | Path) -> list[np.ndarray]:
    source = str(model) if isinstance(model, Path) else model.SerializeToString()
    session = ort.InferenceSession(source, providers=["CPUExecutionProvider"])
    return [np.asarray(a) for a in session.run(None, feeds())]


def assert_close(results: list[np.ndarray], expected: list[np.ndarray]) -> None:
    for a, b in zip(results, expected, strict=True):
        assert np.linalg.norm(a - b) <= 1e-4 * np.linalg.norm(b)


@pytest.mark.parametrize("kind", ["proto", "ir", "graphsurgeon"])
def test_in_memory(decode: onnx.ModelProto, kind: str) -> None:
    """Every kind comes back as itself, computes the same, and what was given is unchanged."""
    model = ir.from_proto(decode)
    copy = onnx.ModelProto.FromString(decode.SerializeToString())  # graph-surgeon's own export writes into it
    source = {"proto": decode, "ir": model, "graphsurgeon": gs.import_onnx(copy)}[kind]
    before = decode.SerializeToString(), ir.to_proto(model).SerializeToString()
    report = deltafuse.fuse(source, require={"kda": 1})
    assert (decode.SerializeToString(), ir.to_proto(model).SerializeToString()) == before
    result = report.result()
    assert type(result) is type(source)
    proto = {
        "proto": lambda: result,
        "ir": lambda: ir.to_proto(result),
        "graphsurgeon": lambda: gs.export_onnx(result),
    }[kind]()
    onnx.checker.check_model(proto)
    calls = [n.op_type for n in proto.graph.node if n.domain == "deltafuse"]
    assert calls == ["KimiDeltaAttention", "LatentAttention", "GroupedQMoE"]
    assert_close(run(proto), run(decode))


def test_external_data_through_the_command(decode: onnx.ModelProto, tmp_path: Path) -> None:
    """Weights outside, output over the input, portable target, report: in a process of its own."""
    path = tmp_path / "model.onnx"
    copy = onnx.ModelProto.FromString(decode.SerializeToString())
    onnx.save(copy, path, save_as_external_data=True, location="model.onnx.data", size_threshold=0)
    program = "from deltafuse.cli import main; main()"
    options = ["-o", path, "--target", "portable", "--require", "kda=1", "--report", tmp_path / "r.json", "--json"]
    done = subprocess.run(
        [sys.executable, "-c", program, "fuse", str(path), *map(str, options)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report == json.loads((tmp_path / "r.json").read_text())
    assert report["regions"][0]["status"] == "fused" and report["regions"][0]["proof"]["proved"]
    written = onnx.load(path, load_external_data=False)
    assert {n.domain for n in written.graph.node} == {""} and not written.functions
    assert {i.name: i.type for i in written.graph.input} == {i.name: i.type for i in decode.graph.input}
    assert {o.name: o.type for o in written.graph.output} == {o.name: o.type for o in decode.graph.output}
    assert {p.key for p in written.metadata_props} >= {"deltafuse.version", "deltafuse.verified"}
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "model.onnx",
        "model.onnx.1.data",
        "model.onnx.data",
        "r.json",
    ]
    (tmp_path / "model.onnx.data").unlink()
    assert_close(run(path), run(decode))


def test_inspect_changes_nothing(decode: onnx.ModelProto) -> None:
    report = deltafuse.inspect(decode)
    assert [(r.op, r.status) for r in report.regions] == [(op, "recognised") for op in ("kda", "mla", "moe")]
    assert report.dry_run
    assert report.nodes_before == len(decode.graph.node)


def test_a_model_without_kda(tmp_path: Path) -> None:
    """Nothing to fuse: exit code 0, 1 if some were required, and the model computes what it did."""
    path = tmp_path / "mla.onnx"
    path.write_bytes(unpack("mla_hub_sdpa_latent"))
    report = deltafuse.fuse(path, tmp_path / "out.onnx", fusions=["kda"])
    assert report.regions == [] and report.output_bytes > 0
    onnx.checker.check_model(str(tmp_path / "out.onnx"))
    with pytest.raises(deltafuse.RequirementError, match="required kda=1, fused 0"):
        deltafuse.fuse(path, require={"kda": 1})
