"""The pass in workflows: before and after Olive's own, with its cache, its files and its evaluator."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import deltafuse
import numpy as np
import onnx
import onnxruntime
import pytest
from exports import library
from olive_kit import Made, error, run, workflow, written

DECODE = "glm5_decode"  # two KDA layers, one MoE, 618 KB
SURGERY = {"type": "GraphSurgeries", "surgeries": [{"surgeon": "ExposeOutputs", "names": []}]}  # changes nothing
FUSE = {"type": "DeltaFuse", "require": {"kda": 2}}


@pytest.fixture(scope="module")
def decode(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(DECODE, tmp_path_factory.mktemp("export"))


def test_command_line(decode: Path, tmp_path: Path) -> None:
    """``olive run --config ... --package-config "$(deltafuse olive-config)"``."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "xdg")}
    (tmp_path / "config.json").write_text(
        json.dumps(workflow(decode, tmp_path, FUSE, {"type": "OnnxBlockWiseRtnQuantization", "block_size": 16}))
    )
    command = [sys.executable, "-c", "from deltafuse.cli import main; main()", "olive-config"]
    package = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.strip()
    command = [sys.executable, "-m", "olive", "run", "--config", "config.json", "--package-config", package]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    made = Made(tmp_path / "out", None)
    assert made.fused == 2 and made.ops().count("MatMulNBits") > 10
    assert [region["status"] for region in made.report()["regions"] if region["op"] == "kda"] == ["fused", "fused"]
    assert 0 < error(made, DECODE) < 0.5  # four bits a weight


@pytest.mark.parametrize(
    ("before", "after", "most"),
    [
        ([], [], 1e-4),
        ([{"type": "OnnxPeepholeOptimizer"}], [], 1e-4),
        ([{"type": "OnnxOpVersionConversion", "target_opset": 23}], [], 1e-4),
        ([{"type": "OnnxFloatToFloat16"}], [], 1e-2),  # its nodes are not in order
        ([{"type": "OnnxBlockWiseRtnQuantization", "block_size": 16}], [], 0.5),
        ([], [{"type": "OnnxDynamicQuantization", "quant_preprocess": False}], 0.5),
        ([], [SURGERY], 1e-4),
    ],
)
def test_between_olives_passes(
    decode: Path, tmp_path: Path, before: list[dict[str, Any]], after: list[dict[str, Any]], most: float
) -> None:
    made = run(decode, tmp_path, *before, FUSE, *after)
    assert made.fused == 2
    assert made.report()["output_bytes"] > 0
    assert error(made, DECODE) < most


def test_passes_that_inline_stay_right(decode: Path, tmp_path: Path) -> None:
    """Some of Olive's passes write functions out: nothing is fused any more, and the numbers are the same."""
    made = run(decode, tmp_path, FUSE, {"type": "OnnxPeepholeOptimizer"})
    assert made.fused == 0 and not made.model().functions
    assert error(made, DECODE) < 1e-4


def test_after_olives_conversion(tmp_path: Path) -> None:
    """From a PyTorch module: Olive exports it, DeltaFuse fuses it."""
    pytest.importorskip("torch")
    script = Path(__file__).with_name("torch_model.py")
    model = {
        "type": "PyTorchModel",
        "model_script": str(script),
        "model_loader": "load",
        "dummy_inputs_func": "example",
        "io_config": {
            "input_names": ["x", "past_state", "past_conv"],
            "output_names": ["y", "present_state", "present_conv"],
        },
    }
    conversion = {"type": "OnnxConversion", "target_opset": 20}
    made = run(model, tmp_path, conversion, {"type": "DeltaFuse", "require": {"kda": 1}})
    assert made.fused == 1
    sys.path.insert(0, str(script.parent))
    try:
        import torch_model
    finally:
        sys.path.remove(str(script.parent))
    module, inputs = torch_model.load(""), torch_model.example(None)
    truth = dict(zip(model["io_config"]["output_names"], module(*inputs), strict=True))
    names = [value.name for value in made.model().graph.input]
    found = library.run(made.path, dict(zip(names, (i.numpy() for i in inputs), strict=True)))
    for name, value in truth.items():
        assert library.error(found[name], value.detach().numpy()) < 1e-4


def test_evaluator_on_the_plugin(decode: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Olive's evaluator runs the fused nodes on our EP, also when the pass's result comes from the cache."""
    try:
        deltafuse.get_library_path()
    except deltafuse.DeltaFuseError as problem:
        pytest.skip(f"no plugin here: {problem}")
    assigned: list[int] = []

    class Session(onnxruntime.InferenceSession):
        """Notes how many nodes of each session are on the plugin EP."""

        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            groups = self.get_provider_graph_assignment_info()
            assigned.append(sum(len(g.get_nodes()) for g in groups if g.ep_name == deltafuse.get_ep_name()))

    record = {"extra_session_config": {"session.record_ep_graph_assignment_info": "1"}}
    model = {"type": "ONNXModel", "model_path": str(decode), "inference_settings": {"session_options": record}}
    # Olive makes the inputs, from the signature: this export's shapes are all fixed.
    latency = {
        "name": "latency",
        "type": "latency",
        "backend": "torch_metrics",
        "sub_types": [{"name": "avg", "priority": 1, "metric_config": {"warmup_num": 1, "repeat_test_num": 2}}],
    }
    evaluator = {
        "evaluators": {"e": {"type": "OnnxEvaluator", "metrics": [latency]}},
        "evaluator": "e",
        "evaluate_input_model": False,
    }
    for folder, options, expected in (("plugin", {"use_plugin": True}, 3), ("plain", {}, 0)):
        run(model, tmp_path / folder, {**FUSE, **options})
        deltafuse.unregister()
        with monkeypatch.context() as patch:
            patch.setattr(onnxruntime, "InferenceSession", Session)
            patch.setattr("deltafuse.olive.fuse", None)  # the pass's result is in the cache
            made = run(model, tmp_path / folder, {**FUSE, **options}, **evaluator)
        assert assigned and set(assigned) == {expected}
        assigned.clear()
        assert json.loads((made.folder / "metrics.json").read_text())["latency-avg"]["value"] > 0
        settings = json.loads((made.folder / "model_config.json").read_text())["config"]["inference_settings"]
        assert settings["session_options"] == record
        ours = ["DeltaFuseExecutionProvider", "CPUExecutionProvider"]
        assert settings.get("execution_provider") == (ours if options else None)


def test_cache(decode: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second run takes the first one's result; another version of deltafuse does not."""
    import deltafuse.olive as adapter

    calls: list[Path] = []
    real = adapter.fuse
    monkeypatch.setattr(adapter, "fuse", lambda model, **options: calls.append(model) or real(model, **options))
    for version, expected in (("1.0", 1), ("1.0", 1), ("1.1", 2)):
        monkeypatch.setattr(adapter, "__version__", version)
        assert run(decode, tmp_path, FUSE).fused == 2
        assert len(calls) == expected
    (tmp_path / "out" / "deltafuse_report.json").write_text("{}")
    assert run(decode, tmp_path, FUSE).report()["regions"], "an old report was left in the output folder"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"fusionz": ["kda"]}, "no option 'fusionz': did you mean 'fusions'"),
        ({"speed": 11}, "no option 'speed': it has fusions, target"),
        ({"fusions": ["kdb"]}, "expected keys among kda"),
        ({"target": "cuda"}, "expected one of plugin, portable"),
        ({"require": {"kda": 3}}, "required kda=3, fused 2"),
        ({"require": {"abc": 1}}, "expected an op among kda"),
        ({"proof_memory": "much"}, "expected a size"),
        ({"quantize": "experts=int5"}, "quantize: "),
        ({"calibration": "absent.npz"}, "nothing to quantize"),
        ({"quantize": "dense=int8:128", "algorithm": "best"}, "expected one of auto, nearest, aware, gptq"),
        ({"quantize": "cache=int8"}, "takes its scales from a calibration"),
        ({"package_version": "0.0.1"}, "leave the option out"),
    ],
)
def test_what_stops_a_workflow(decode: Path, tmp_path: Path, options: dict[str, Any], expected: str) -> None:
    """Olive drops unknown options and goes on after most errors: ours are of a kind that it passes on."""
    from deltafuse.olive import FusionFailed

    with pytest.raises(FusionFailed, match=expected):
        run(decode, tmp_path, {"type": "DeltaFuse", **options})
    assert not (tmp_path / "out" / "model.onnx").exists()


def test_quantize(tmp_path: Path) -> None:
    """Weights of experts in 8 bits, with statistics of activations, as ``fuse`` does it."""
    from deltafuse.calibration import calibrate

    model = written("kimi_decode", tmp_path)
    statistics = tmp_path / "statistics.npz"
    calibrate(model, samples=1, tokens=4, rows=8).save(statistics)
    options = {"require": {"kda": 1, "moe": 1}, "quantize": "experts=int8:channel", "calibration": str(statistics)}
    made = run(model, tmp_path, {"type": "DeltaFuse", **options})
    found = made.report()["quantization"]
    assert found["calibration"] == str(statistics) and found["bytes_after"] < found["bytes_before"]
    assert found["algorithm"] == "gptq"
    assert {tensor["group"] for tensor in found["tensors"]} == {"experts"}
    assert 0 < error(made, "kimi_decode") < 0.1


def test_caches_in_8_bits(tmp_path: Path) -> None:
    """A cache of keys and values becomes one of latents, and that one of codes, with the statistics' scales."""
    from deltafuse.calibration import calibrate

    model = written("mla_expanded", tmp_path)
    statistics = tmp_path / "statistics.npz"
    calibrate(model, samples=1, tokens=4).save(statistics)
    options = {"latent_cache": True, "quantize": "cache=int8", "calibration": str(statistics)}
    made = run(model, tmp_path, {"type": "DeltaFuse", **options})
    (cache,) = made.report()["quantization"]["caches"]
    assert [port["dtype"] for port in cache["after"]] == ["int8", "int8", "float32", "float32"]


def test_other_models_are_refused(tmp_path: Path) -> None:
    from deltafuse.olive import FusionFailed

    script = str(Path(__file__).with_name("torch_model.py"))
    model = {"type": "PyTorchModel", "model_script": script, "model_loader": "load"}
    with pytest.raises(FusionFailed, match="put OnnxConversion before it"):
        run(model, tmp_path, {"type": "DeltaFuse"})


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, []),
        ({"save_as_external_data": True}, ["deltafuse_model.onnx.data"]),
        ({"save_as_external_data": True, "external_data_name": "weights.bin"}, ["weights.bin"]),
        ({"save_as_external_data": True, "convert_attribute": True}, ["deltafuse_model.onnx.data"]),
        ({"save_as_external_data": True, "all_tensors_to_one_file": False, "size_threshold": 2048}, None),
    ],
)
def test_external_data(decode: Path, tmp_path: Path, options: dict[str, Any], expected: list[str] | None) -> None:
    made = run(decode, tmp_path, {**FUSE, **options})
    inside = onnx.load(made.path, load_external_data=False)
    where = {i.external_data[0].value for i in inside.graph.initializer if i.data_location == onnx.TensorProto.EXTERNAL}
    assert where == set(expected) if expected is not None else len(where) > 3
    threshold = options.get("size_threshold", 1024)
    for tensor in inside.graph.initializer:
        size = onnx.numpy_helper.to_array(tensor, str(made.folder)).nbytes
        if options and tensor.data_type != onnx.TensorProto.STRING:
            assert (tensor.data_location == onnx.TensorProto.EXTERNAL) == (size >= threshold), tensor.name
    assert error(made, DECODE) < 1e-4
    again = run(decode, tmp_path / "again", {**FUSE, **options}, SURGERY)
    assert again.fused == 2 and error(again, DECODE) < 1e-4


def test_a_model_of_components(decode: Path, tmp_path: Path) -> None:
    """Each is fused for itself, must meet the requirements itself, and has its report."""
    other = written("kimi_decode", tmp_path)
    parts = [{"type": "ONNXModel", "model_path": str(path)} for path in (decode, other)]
    model = {"type": "CompositeModel", "model_components": parts, "model_component_names": ["one", "two"]}
    made = run(model, tmp_path, {"type": "DeltaFuse", "require": {"kda": 1}})
    for name, count in (("one", 2), ("two", 1)):
        ops = [node.op_type for node in onnx.load(made.folder / f"{name}.onnx").graph.node]
        assert ops.count("KimiDeltaAttention") == count
        report = json.loads((made.folder / f"{name}_deltafuse_report.json").read_text())
        assert [region["status"] for region in report["regions"] if region["op"] == "kda"] == ["fused"] * count


def test_without_the_engine(decode: Path, tmp_path: Path) -> None:
    """``create_pass_from_dict``, Olive's way to run one pass from Python."""
    from deltafuse.olive import DeltaFuse
    from olive.model import ONNXModelHandler
    from olive.passes.olive_pass import create_pass_from_dict

    handler = ONNXModelHandler(str(decode), model_attributes={"mine": 1})
    options = {"fusions": ["kda"], "target": "portable", "verify": False}
    made = create_pass_from_dict(DeltaFuse, options, disable_search=True).run(handler, str(tmp_path / "out"))
    assert made.model_attributes["mine"] == 1
    assert not made.load_model().functions and Path(made.model_path).is_relative_to(tmp_path / "out")
    report = json.loads((tmp_path / "out" / "deltafuse_report.json").read_text())
    assert report["output"] == made.model_path and report["verify"] is False
    assert {(region["op"], region["status"]) for region in report["regions"]} == {("kda", "fused-unproved")}
    feeds = library.export(DECODE).feeds()
    truth = library.run(handler.load_model(), feeds)
    assert library.worst(library.run(made.model_path, feeds), truth)[0] < 1e-4
    assert np.isfinite(next(iter(truth.values()))).all()
