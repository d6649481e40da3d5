"""Quantization through ``deltafuse.fuse`` and the command: an export with experts, calibrated and not."""

from __future__ import annotations

import json
from pathlib import Path

import deltafuse
import numpy as np
import onnx
import onnx_ir as ir
import pytest
from deltafuse.calibration import calibrate, load
from deltafuse.calibration_rows import Rows
from deltafuse.cli import app
from deltafuse.errors import OptionError
from exports import library
from typer.testing import CliRunner

from .models import layer_model, run


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A model that is fused already: proofs are tested elsewhere."""
    target = tmp_path / "model.onnx"
    onnx.save(ir.to_proto(layer_model(layers=1)), target)
    return target


def test_fuse_quantizes_and_reports(path: Path, tmp_path: Path) -> None:
    output, report = tmp_path / "out.onnx", tmp_path / "report.json"
    done = deltafuse.fuse(path, output, quantize={"experts": "int4:128", "dense": "int8:128"}, report=report)
    assert done.quantization is not None and len(done.quantization.tensors) == 7
    assert output.stat().st_size < 0.3 * path.stat().st_size
    written = json.loads(report.read_text())["quantization"]
    assert written["schemes"] == {"experts": "int4:128", "dense": "int8:128"}
    assert all(0 < tensor["error"] < 0.2 for tensor in written["tensors"])
    assert written["bytes_after"] < 0.3 * written["bytes_before"]
    x = np.random.default_rng(0).standard_normal((3, 256)).astype(np.float32)
    assert np.all(np.isfinite(run(ir.load(output), x)))
    # the model itself is as it was
    assert deltafuse.fuse(path).quantization is None


def test_weights_stay_external_where_they_were(path: Path, tmp_path: Path) -> None:
    outside, output = tmp_path / "outside.onnx", tmp_path / "out.onnx"
    onnx.save(onnx.load(path), outside, save_as_external_data=True, location="outside.data")
    done = deltafuse.fuse(outside, output, quantize="experts=int4:128,dense=int8:128")
    assert done.output_data == f"{output}.data"
    assert output.stat().st_size < 0.1 * done.output_data_bytes


def test_weights_that_are_not_finite_are_said(path: Path) -> None:
    for name, groups in (("layer0.down_weight", "experts=int4:128"), ("layer0.in", "dense=int8:128")):
        model = onnx.load(path)
        (tensor,) = (t for t in model.graph.initializer if t.name == name)
        array = onnx.numpy_helper.to_array(tensor).copy()
        array.flat[3] = np.nan
        tensor.CopyFrom(onnx.numpy_helper.from_array(array, name))
        with pytest.raises(OptionError, match=f"quantize: {name}: weights are not all finite"):
            deltafuse.fuse(model, quantize=groups)


def test_fused_nodes_that_a_model_came_with_do_not_count(path: Path) -> None:
    with pytest.raises(deltafuse.RequirementError, match=r"what the model came with does not count \(moe=1\)"):
        deltafuse.fuse(path, require={"moe": 1})


def test_the_portable_target_is_quantized_too(path: Path) -> None:
    done = deltafuse.fuse(path, target="portable", quantize="experts=int8:channel")
    assert done.model is not None and not done.model.functions
    assert done.quantization is not None and len(done.quantization.tensors) == 4
    x = np.random.default_rng(0).standard_normal((3, 256)).astype(np.float32)
    before = run(ir.load(path), x)
    assert np.linalg.norm(run(done.model, x) - before) < 0.05 * np.linalg.norm(before)


def test_a_dry_run_quantizes_nothing(path: Path) -> None:
    report = deltafuse.fuse(path, dry_run=True, quantize="dense=int8:128")
    assert report.quantization is None
    assert "quantize: not tried, since a dry run changes nothing" in report.warnings


def command(args: list[str]) -> str:
    result = CliRunner().invoke(app, args)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_calibrated(path: Path, tmp_path: Path) -> None:
    data = tmp_path / "data.npz"
    calibrate(path, samples=2, tokens=16).save(data)
    done = deltafuse.fuse(path, quantize="experts=int4:128,dense=int4:128", calibration=data)
    assert done.quantization is not None and done.quantization.calibration == str(data)
    known = {tensor.name for tensor in done.quantization.tensors if tensor.calibrated}
    assert done.quantization.algorithm == "aware"
    with pytest.raises(OptionError, match="holds no rows of activations: `deltafuse calibrate --rows 1024`"):
        deltafuse.fuse(path, quantize="dense=int4:128", calibration=data, algorithm="gptq")
    # the turned weight of the last product has been folded into a constant with a name of its own
    assert {"layer0.in", "layer0.gemm", "layer0.moe.gate_up", "layer0.moe.shared_gate_up"} < known and len(known) == 5


def correlated(rng: np.random.Generator, count: int, channels: int, rank: int = 24) -> np.ndarray:
    """Rows that fill a small part of their space, as activations do."""
    basis = np.random.default_rng(77).standard_normal((rank, channels))
    return (rng.standard_normal((count, rank)) @ basis / np.sqrt(rank)).astype(np.float32)


def test_feeding_errors_back_lowers_the_error_on_correlated_inputs(path: Path, tmp_path: Path) -> None:
    """From the command line: inputs, rows of activations, three algorithms, errors on other inputs."""
    rng, data, inputs = np.random.default_rng(5), tmp_path / "data.npz", tmp_path / "inputs.npz"
    np.savez(inputs, x=correlated(rng, 600, 256))
    command(["calibrate", str(path), "-o", str(data), "-i", str(inputs), "--rows", "512"])
    assert all(t.samples is not None and len(t.samples) == 512 for t in load(data).tensors.values())
    x = correlated(rng, 64, 256)
    before = run(ir.load(path), x)
    errors, reports = {}, {}
    for algorithm in ("nearest", "aware", "gptq", "auto"):
        output = tmp_path / f"{algorithm}.onnx"
        options = ["--quantize", "experts=int4:128,dense=int4:128", "--calibration", str(data)]
        report = command(["fuse", str(path), "-o", str(output), *options, "--algorithm", algorithm, "--json"])
        reports[algorithm] = json.loads(report)["quantization"]
        errors[algorithm] = np.linalg.norm(run(ir.load(output), x) - before) / np.linalg.norm(before)
    assert [r["algorithm"] for r in reports.values()] == ["nearest", "aware", "gptq", "gptq"]
    assert errors["gptq"] < 0.6 * errors["nearest"], errors
    assert errors["aware"] < errors["nearest"], errors
    assert errors["auto"] == errors["gptq"]
    # every matrix of the experts, down projections too, made better
    experts = [t for t in reports["gptq"]["tensors"] if t["group"] == "experts"]
    assert len(experts) == 4 and all(t["calibrated"] for t in experts)
    assert all(t["product_error"] < t["error"] for t in experts), experts
    assert all(t["product_error"] < 0.6 * t["error"] for t in experts if t["name"].endswith("gate_up")), experts
    # what the others make of the same rows is told too
    made = {a: {t["name"]: t for t in r["tensors"]} for a, r in reports.items()}
    assert all(t["product_error"] < made["nearest"][name]["product_error"] for name, t in made["gptq"].items()), made
    assert not any(t["calibrated"] for t in made["nearest"].values())
    assert all(t["calibrated"] for name, t in made["aware"].items() if "moe" in name), made["aware"]


@pytest.mark.parametrize("scheme", ["fp8:128x128", "bf16", "int8:channel"])
def test_every_format_is_measured_on_what_a_calibration_saw(path: Path, tmp_path: Path, scheme: str) -> None:
    data = tmp_path / "data.npz"
    calibrate(path, samples=2, tokens=16).save(data)
    done = deltafuse.fuse(path, quantize=f"experts={scheme},dense=int8:128", calibration=data)
    assert done.quantization is not None
    seen = {t.name: t.product_error for t in done.quantization.tensors if t.product_error is not None}
    # mean squares say nothing of what down projections read
    assert {"layer0.in", "layer0.gemm", "layer0.moe.gate_up", "layer0.moe.shared_gate_up"} < set(seen) and len(
        seen
    ) == 5
    assert all(0 < error < 0.1 for error in seen.values()), seen


def test_an_activation_goes_by_the_names_that_it_was_moved_from(tmp_path: Path) -> None:
    """What an unfused model's router reads is a reshaped x, and the fused node reads x."""
    export = library.export("moe_gather")
    path, data = tmp_path / "export.onnx", tmp_path / "data.npz"
    onnx.save(export.proto(), path)
    calibrate(path, samples=4, tokens=12, rows=32).save(data)
    done = deltafuse.fuse(path, quantize="experts=int8:8", calibration=data, algorithm="gptq")
    assert done.count("moe") == 1 and done.quantization is not None
    assert {t.calibrated for t in done.quantization.tensors} == {True}
    assert not any("rounded to nearest" in note for note in done.quantization.notes)


def test_rows_are_drawn_evenly() -> None:
    drawn = np.zeros(40)
    for seed in range(400):
        rows = Rows(8, seed)
        for start in (0, 3, 10, 11):
            rows.add(np.arange(start, {0: 3, 3: 10, 10: 11, 11: 40}[start])[:, None].astype(np.float32))
        kept = rows.kept()[:, 0].astype(int)
        assert len(set(kept)) == 8
        drawn[kept] += 1
    assert drawn.min() > 45 and drawn.max() < 120  # 80 each
    few = Rows(8, 0)
    assert few.kept().shape == (0, 0)
    few.add(np.ones((3, 2), np.float32))
    assert few.kept().shape == (3, 2)


def test_a_calibration_of_another_model_is_refused(path: Path, tmp_path: Path) -> None:
    data = tmp_path / "data.npz"
    calibrate(path, samples=2, tokens=16).save(data)
    with np.load(data) as file:
        arrays = dict(file)
    index = json.loads(str(arrays["index"]))

    def changed(**values: object) -> None:
        np.savez(data, **{**arrays, **{name.replace("_0", ".0"): value for name, value in values.items()}})

    def refused(message: str) -> None:
        with pytest.raises(OptionError, match=message):
            deltafuse.fuse(path, quantize="experts=int4:128", calibration=data)

    entry = index["tensors"][0]
    channels = entry["channels"]
    other = json.dumps({**index, "tensors": [{**entry, "channels": 7}]})
    changed(index=np.array(other), amax_0=np.ones(7, np.float32), mean_square_0=np.ones(7, np.float32))
    refused(f"is of another model .*: '{entry['name']}' has 7 channels there and {channels} here")
    changed(index=np.array(json.dumps({**index, "tensors": [{**entry, "name": "elsewhere"}]})))
    refused("is of another model .*: this one has none of its 1 values")
    changed(amax_0=np.array(["text"]))
    refused(f"array 'amax.0' is of type <U4, shape ..,.: expected {channels} numbers")
    changed(index=np.array('{"a": 1}'))
    refused("its index names no format and version")
    np.savez(data, **{n: a if n == "index" else np.full_like(a, np.nan) for n, a in arrays.items()})
    refused("nothing but zeros and numbers that are not finite")


def test_the_command(path: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.onnx"
    args = ["fuse", str(path), "-o", str(output), "--quantize", "experts=int4:128", "--json"]
    result = CliRunner().invoke(app, args)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["quantization"]["schemes"] == {"experts": "int4:128"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quantize": "experts=int3:128"}, "quantize: 'int3:128': format 'int3'"),
        ({"quantize": "everything=int4:128"}, "expected one of experts, dense"),
        ({"quantize": 4}, "expected text such as"),
        ({"calibration": "data.npz"}, "nothing to quantize"),
        ({"quantize": "dense=int8:128", "algorithm": "gptq"}, "algorithm gptq: give a calibration"),
        ({"quantize": "dense=int8:128", "algorithm": "best"}, "expected one of auto, nearest, aware, gptq"),
        ({"quantize": "dense=int8:128", "calibration": "missing.npz"}, "missing.npz"),
    ],
)
def test_options_that_are_not_taken(path: Path, options: dict[str, object], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        deltafuse.fuse(path, **options)  # type: ignore[arg-type]
