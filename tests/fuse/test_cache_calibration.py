"""8-bit caches from the command line: calibrated on an export or on a fused model, fused, reported, checked, run."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import deltafuse
import numpy as np
import onnx
import pytest
from deltafuse.calibration import Calibration, calibrate, load
from deltafuse.cli import app
from deltafuse.compare import compare
from deltafuse.errors import DeltaFuseError
from exports import library
from typer.testing import CliRunner

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
from generate import generate

VOCABULARY = 20
FUSE: dict[str, Any] = {"fusions": ["mla"], "verify": False}


def command(*args: str | Path, code: int = 0) -> str:
    result = CliRunner().invoke(app, [*map(str, args)])
    assert result.exit_code == code, result.output
    return result.output if code else result.stdout


@pytest.fixture
def kimi(tmp_path: Path) -> Path:
    path = tmp_path / "kimi.onnx"
    onnx.save(library.export("kimi_decode").proto(), path)
    return path


def scales_of(path: Path) -> list[np.ndarray]:
    model = onnx.load(path)
    kept = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    nodes = [node for node in model.graph.node if node.op_type == "LatentAttention"]
    return [kept[name] for node in nodes for name in node.input if name.endswith(".scale")]


@pytest.mark.parametrize(
    "name", ["mla_expanded", "mla_static", "mla_packed", "mla_nonorm", "kimi_decode", "mla_one_product"]
)
def test_an_export_and_what_was_fused_of_it_give_the_same_scales(tmp_path: Path, name: str) -> None:
    """Latents of an unfused model are the input of kv_b's product or a state, those of a fused one are made anew."""
    before, fused = tmp_path / "before.onnx", tmp_path / "fused.onnx"
    onnx.save(library.export(name).proto(), before)
    deltafuse.fuse(before, fused, **FUSE)
    found = []
    for path in (before, fused):
        data, output = tmp_path / f"{path.stem}.npz", tmp_path / f"{path.stem}.int8.onnx"
        calibrate(path, samples=2, tokens=9, rows=32, vocabulary=VOCABULARY).save(data)
        report = deltafuse.fuse(path, output, quantize="cache=int8", calibration=data, latent_cache=True, **FUSE)
        assert report.quantization is not None
        (cache,) = report.quantization.caches
        assert cache.calibrated.endswith(".latent") == (path is fused)
        assert cache.error is None or 1e-3 < cache.error < 1e-2
        found += scales_of(output)
    assert cache.error is not None
    np.testing.assert_allclose(found[0], found[1], rtol=1e-5)
    latents = [entry for entry in load(data).tensors.values() if entry.kinds == ["latent"]]
    assert len(latents) == 1 and latents[0].samples is not None and len(latents[0].samples) > 20
    if name != "mla_static":  # float8 is the same whatever was seen
        report = deltafuse.fuse(fused, quantize="cache=fp8:128", calibration=data, latent_cache=True, **FUSE)
        assert report.quantization is not None and 0.01 < (report.quantization.caches[0].error or 0) < 0.04


def test_a_model_with_8_bit_caches_is_calibrated_without_them(kimi: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.onnx"
    deltafuse.fuse(kimi, output, quantize="cache=fp8:128", **FUSE)
    kinds = {name: entry.kinds for name, entry in calibrate(output, samples=1, tokens=3).tensors.items()}
    assert not any("latent" in of for of in kinds.values()) and "cache" in kinds["present.1.values"]


def test_from_the_command_line(kimi: Path, tmp_path: Path) -> None:
    """Calibrate, fuse with weights besides, the report in three forms, verify, run."""
    data, output, page = tmp_path / "data.npz", tmp_path / "out.onnx", tmp_path / "out.html"
    printed = command("calibrate", kimi, "-o", data, "--samples", "3", "--length", "12")
    assert "inputs of products with weights and 4 states, " in printed
    asked = ["--quantize", "cache=int8,experts=int8:8", "--calibration", data, "--no-verify"]
    report = json.loads(command("fuse", kimi, "-o", output, *asked, "--json"))["quantization"]
    assert report["schemes"] == {"cache": "int8", "experts": "int8:8"}
    assert {tensor["group"] for tensor in report["tensors"]} == {"experts"}
    (cache,) = report["caches"]
    assert (cache["bytes_before"], cache["bytes_after"], cache["unseen"]) == (80, 32, 0)
    assert 1e-3 < cache["error"] < 1e-2 and cache["calibrated"]
    names = [(port["name"], port["kind"], port["dtype"], port["shape"]) for port in cache["after"][:2]]
    assert names == [
        ("past.1.keys", "input", "int8", [1, "past", 16]),
        ("present.1.keys", "output", "int8", [1, "past + 1", 16]),
    ]
    shown = " ".join(command("fuse", kimi, "-o", output, *asked, "--report", page).split())
    assert "as int8: 80 bytes a token became 32, relative error" in shown
    assert "became past.1.keys int8 [1, past, 16]" in shown
    written = page.read_text()
    assert "Caches of latents in 8 bits" in written and "80 → 32" in written and "past.1.keys" in written
    assert "the same" in command("verify", kimi, output, "--tokens", "5", "--device", "cpu")
    ran = json.loads(command("run", output, "--tokens", "3,4,5", "--json", "--device", "cpu"))
    kinds = {entry["name"]: entry["dtype"] for entry in ran["outputs"]}
    assert (kinds["present.1.keys"], kinds["present.1.values"]) == ("int8", "float32")


def test_bench_takes_them(kimi: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.onnx"
    deltafuse.fuse(kimi, output, quantize="cache=fp8:128", **FUSE)
    done = json.loads(command("bench", output, "--tokens", "4", "--steps", "3", "--repeats", "1", "--json"))
    assert done["same"] and any(v["timings"] for v in done["variants"])


@pytest.mark.parametrize("target", ["plugin", "portable"])
def test_two_models_with_8_bit_caches_are_compared_code_by_code(kimi: Path, tmp_path: Path, target: str) -> None:
    """From random codes too; a model that reads them otherwise is seen."""
    one, other = tmp_path / "one.onnx", tmp_path / "other.onnx"
    deltafuse.fuse(kimi, one, quantize="cache=fp8:128", **FUSE)
    deltafuse.fuse(kimi, other, quantize="cache=fp8:128", target=target, **FUSE)
    found = compare(one, other, tokens=(3,))
    assert found.same and found.own_states == ([], [])
    assert {"present.1.keys", "present.1.keys.scale"} <= {o.output for case in found.cases for o in case.outputs}
    assert [case.name.split(",")[0] for case in found.cases] == ["zero states", "random states"]


def test_files_that_hold_no_numbers_are_errors_in_words(kimi: Path, tmp_path: Path) -> None:
    data, output = tmp_path / "data.npz", tmp_path / "out.onnx"
    found = calibrate(kimi, samples=1, tokens=6)
    for bad in (np.nan, np.inf):
        changed = Calibration(found.model, 1, 6, 0, dict(found.tensors))
        entry = changed.tensors["present.1.keys"]
        entry.amax = entry.amax.copy()
        entry.amax[2] = bad
        for name in [n for n in changed.tensors if len(changed.tensors[n].amax) == 16 and n != "present.1.keys"]:
            del changed.tensors[name]
        changed.save(data)
        args = ["fuse", kimi, "-o", output, "--quantize", "cache=int8", "--calibration", data, "--no-verify"]
        said = " ".join(command(*args, code=2).split())
        assert "present.1.keys: the largest magnitudes of 1 of 16 channels are negative or not finite" in said
        assert not output.exists()
    said = " ".join(command("fuse", kimi, "-o", output, "--quantize", "cache=int8", code=2).split())
    assert "cache=int8 takes its scales from a calibration: `deltafuse calibrate` writes one" in said


@pytest.mark.parametrize("scheme", ["cache=int8", "cache=fp8:128"])
def test_codes_are_no_latents(kimi: Path, tmp_path: Path, scheme: str) -> None:
    """A calibration of the model with 8-bit caches has the export's names, and once had their codes as magnitudes."""
    held, data, output = tmp_path / "held.npz", tmp_path / "data.npz", tmp_path / "out.onnx"
    calibrate(kimi, samples=1, tokens=6).save(data)
    deltafuse.fuse(kimi, output, quantize=scheme, calibration=data, **FUSE)
    found = calibrate(output, samples=1, tokens=6)
    assert "present.1.values" in found.tensors and "present.1.keys" not in found.tensors
    found.save(held)
    with pytest.raises(DeltaFuseError, match="the calibration has nothing of its latents"):
        deltafuse.fuse(kimi, tmp_path / "other.onnx", quantize="cache=int8", calibration=held, **FUSE)
    assert not (tmp_path / "other.onnx").exists()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_inputs_that_are_not_finite_make_no_calibration(tmp_path: Path, bad: float) -> None:
    model, inputs, data = tmp_path / "model.onnx", tmp_path / "inputs.npz", tmp_path / "data.npz"
    onnx.save(library.export("mla_absorbed").proto(), model)
    x = np.ones((1, 1, 24), np.float32)
    x[0, 0, 3] = bad
    np.savez(inputs, x=x)
    said = " ".join(command("calibrate", model, "-i", inputs, "-o", data, "--dim", "past=4", code=2).split())
    assert "holds values that are not finite" in said and not data.exists()


@pytest.mark.parametrize("scheme", ["cache=int8", "cache=fp8:128"])
def test_the_example_generates_with_them(kimi: Path, tmp_path: Path, scheme: str) -> None:
    """The same tokens as from the exact cache, as far as one is much likelier than the others: at the start."""
    data, output = tmp_path / "data.npz", tmp_path / "out.onnx"
    calibrate(kimi, samples=3, tokens=12).save(data)
    deltafuse.fuse(kimi, output, quantize=scheme, calibration=data, **FUSE)
    made = []
    for path in (kimi, output):
        with deltafuse.capture(path, device="cpu") as runner:
            assert "past.1.keys" in runner.states and "past.1.keys.scale" not in runner.inputs
            made.append(generate(runner, [1, 2, 3, 4, 5], 8, piece=1))
            assert generate(runner, [1, 2, 3, 4, 5], 8, piece=1) == made[-1]
    assert made[0][:2] == made[1][:2]


def test_a_cache_of_one_size_is_carried_in_place(tmp_path: Path) -> None:
    """States of codes and of scales, written where they are read."""
    before, output = tmp_path / "before.onnx", tmp_path / "out.onnx"
    onnx.save(library.export("mla_scatter").proto(), before)
    deltafuse.fuse(before, output, quantize="cache=fp8:128", **FUSE)
    model = onnx.load(output)
    rng = np.random.default_rng(3)
    made = []
    for in_place in (False, True):
        with deltafuse.capture(output, device="cpu", in_place=in_place) as runner:
            assert runner.states == {"rest_1": "out_1", "rest_1.scale": "out_1.scale", "rest_2": "out_2"}
            shapes = {i.name: library.shape_of(i) for i in model.graph.input}
            rng = np.random.default_rng(3)
            steps = []
            for at in range(5):
                feeds: library.Arrays = {}
                for value in model.graph.input:
                    if value.name in runner.inputs:
                        shape = [d if isinstance(d, int) else 1 for d in shapes[value.name]]
                        whole = value.type.tensor_type.elem_type != onnx.TensorProto.FLOAT
                        kind = onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
                        feeds[value.name] = (
                            np.full(shape, at, kind) if whole else rng.standard_normal(shape).astype(kind)
                        )
                steps.append(runner.run(feeds)["out_0"])
            codes = runner.state_arrays()["rest_1"].astype(np.float32)
            assert np.abs(codes[:, :5]).max() == 448 and not codes[:, 5:].any()
            made.append(steps)
    assert all(np.array_equal(a, b) for a, b in zip(*made, strict=True))
