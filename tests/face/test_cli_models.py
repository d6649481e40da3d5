"""``verify``, ``bench``, ``run`` and ``calibrate`` on real exports: what they find, and what they say to whom."""

from __future__ import annotations

import json
import lzma
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import deltafuse
import numpy as np
import onnx
import pytest
from deltafuse.calibration import load
from deltafuse.cli import app
from onnx import TensorProto, helper, numpy_helper
from typer.testing import CliRunner

runner = CliRunner()
DATA = Path(__file__).resolve().parents[1] / "data"
COMMANDS = ("fuse", "inspect", "verify", "bench", "run", "calibrate", "doctor", "olive-config", "version")


def unpacked(name: str, folder: Path) -> Path:
    path = folder / f"{name}.onnx"
    path.write_bytes(lzma.decompress((DATA / f"{name}.onnx.xz").read_bytes()))
    return path


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A decoder and a prompt, each as exported and fused, and the decoder with one weight changed by a hair."""
    folder = tmp_path_factory.mktemp("models")
    made = {}
    for name, kind in (("bailing_wrap_decode_dyn_batched", "decode"), ("kimi_prefill_dyn", "prompt")):
        made[kind] = unpacked(name, folder)
        made[f"{kind}_fused"] = folder / f"{kind}_fused.onnx"
        deltafuse.fuse(made[kind], made[f"{kind}_fused"])
    other = onnx.load(made["decode"])
    weight = max(other.graph.initializer, key=lambda tensor: np.prod(tensor.dims))
    weight.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(weight) * np.float32(1.01), weight.name))
    made["other"] = folder / "other.onnx"
    onnx.save(other, made["other"])
    return made


def call(*arguments: Any) -> Any:
    return runner.invoke(app, [str(argument) for argument in arguments])


def as_json(*arguments: Any) -> tuple[int, dict[str, Any]]:
    """The exit code and the one object on stdout; nothing else is there."""
    result = call(*arguments, "--json")
    return result.exit_code, json.loads(result.stdout)


# -- verify -----------------------------------------------------------------------------------------------------------


def test_verify_a_decoder(models: dict[str, Path]) -> None:
    code, found = as_json("verify", models["decode"], models["decode_fused"], "--tokens", 5, "--steps", 2)
    assert code == 0 and found["same"] and 0 < found["error"] < 1e-4
    assert [case["name"] for case in found["cases"]] == [
        "zero states, 1 tokens at a time",
        "random states, 1 tokens at a time",
    ]
    assert [case["past"] for case in found["cases"]] == [0, 8]
    for case in found["cases"]:
        assert case["tokens"] == [1] * 7
        outputs = {row["output"]: row for row in case["outputs"]}
        assert len(outputs) == 5 and sum(row["state"] for row in outputs.values()) == 4
        assert all(row["steps"] == 7 and row["limit"] == 1e-4 and row["same"] for row in outputs.values())


def test_verify_finds_a_difference(models: dict[str, Path]) -> None:
    result = call("verify", models["decode"], models["other"])
    assert result.exit_code == 1 and "NOT the same" in result.stdout and "differs" in result.stdout
    assert call("verify", models["decode"], models["other"], "--tolerance", 0.5).exit_code == 0
    assert call("verify", models["decode"], models["other"], "-q").stdout == ""
    assert call("verify", models["decode"], models["decode"], "--tolerance", 0).exit_code == 0


def test_verify_where_the_export_fails(models: dict[str, Path]) -> None:
    """Fusing repairs a prompt export beyond 64 tokens: said, and no difference. The other way round it is one."""
    code, found = as_json("verify", models["prompt"], models["prompt_fused"], "--tokens", "12,70")
    assert code == 0 and [case["status"] for case in found["cases"]] == ["same", "repaired"]
    assert "70" in found["cases"][1]["reason"]
    assert as_json("verify", models["prompt_fused"], models["prompt"], "--tokens", "12,70")[0] == 1
    code, found = as_json("verify", models["prompt"], models["prompt"], "--tokens", 70)
    assert code == 2 and "neither model runs" in found["error"]


def test_verify_given_inputs(models: dict[str, Path], tmp_path: Path) -> None:
    np.savez(tmp_path / "in.npz", input_ids=np.array([[3, 1, 2]]))
    code, found = as_json("verify", models["prompt"], models["prompt_fused"], "-i", tmp_path / "in.npz")
    assert code == 0 and [(case["name"], case["tokens"]) for case in found["cases"]] == [("given inputs", [3])]


def test_verify_what_cannot_be_compared(models: dict[str, Path]) -> None:
    code, found = as_json("verify", models["decode"], models["prompt"])
    assert code == 2 and "the models' inputs differ: only the first has flat_0" in found["error"]


def test_verify_says_what_quantized_weights_need(models: dict[str, Path], tmp_path: Path) -> None:
    before, after = unpacked("moe_gather", tmp_path), tmp_path / "quantized.onnx"
    deltafuse.fuse(before, after, quantize="experts=int4:8")
    code, found = as_json("verify", before, after)
    assert code == 1 and ["--tolerance" in note for note in found["notes"]] == [True]
    code, found = as_json("verify", before, after, "--tolerance", 0.5)
    assert code == 0 and not found["notes"]
    _, found = as_json("verify", models["decode"], models["other"])  # a weight of which is wrong
    assert not found["notes"]


# -- bench ------------------------------------------------------------------------------------------------------------


def test_bench(models: dict[str, Path]) -> None:
    code, found = as_json("bench", models["prompt"], "--tokens", "8,70", "--repeats", 3)
    assert code == 0 and found["same"] and found["fused"]["kda"] == 1
    variants = {variant["name"]: variant for variant in found["variants"]}
    assert {"as it is", "fused, plugin", "fused, no plugin", "portable, no plugin"} <= set(variants)
    for name, variant in variants.items():
        if variant["failed"]:
            assert variant["plugin"] and "not installed" in variant["failed"]
            continue
        lengths = [timing["tokens"] for timing in variant["timings"]]
        assert lengths == ([8] if name == "as it is" else [8, 70])
        assert all(0 < timing["least_ms"] <= timing["median_ms"] for timing in variant["timings"])
        assert (variant["fused_nodes"] > 0) is variant["plugin"]
    assert "cannot be run" in variants["as it is"]["notes"][0]


def test_bench_a_fused_decoder(models: dict[str, Path]) -> None:
    result = call("bench", models["decode_fused"], "--steps", 3, "--tokens", 2)
    assert result.exit_code == 0, result.output
    assert "as it is, plugin" in result.stdout and "one token" in result.stdout and "\x1b" not in result.stdout


def test_bench_checks_the_numbers(models: dict[str, Path]) -> None:
    result = call("bench", models["decode"], "--tolerance", 0, "--target", "portable", "--steps", 2, "--tokens", 1)
    assert result.exit_code == 1 and "the numbers differ" in result.stdout
    result = call("bench", models["decode"], "--target", "cuda")
    assert result.exit_code == 2 and "expected some of plugin, portable" in result.stderr


# -- run --------------------------------------------------------------------------------------------------------------


def test_run(models: dict[str, Path], tmp_path: Path) -> None:
    out = tmp_path / "out.npz"
    code, found = as_json("run", models["decode_fused"], "--tokens", "3,1,4,1,5", "-o", out)
    assert code == 0 and found["steps"] == 5 and len(found["outputs"]) == 5 and len(found["next_tokens"]) == 5
    assert sum(found["nodes"].values()) > 50
    with np.load(out) as arrays:
        logits = arrays["linear_19"]
        assert int(np.argmax(logits[0, -1])) == found["next_tokens"][0]
    _, stock = as_json("run", models["decode"], "--tokens", "3,1,4,1,5", "--no-plugin")
    assert stock["next_tokens"] == found["next_tokens"]
    text = call("run", models["prompt_fused"], "--seed", 3)
    assert text.exit_code == 0 and "most likely next tokens" in text.stdout


def test_run_bad_tokens(models: dict[str, Path]) -> None:
    for tokens, expected in (("200", "takes 0 to 127"), ("a", "expected whole numbers")):
        result = call("run", models["decode"], "--tokens", tokens)
        assert result.exit_code == 2 and expected in result.stderr


# -- calibrate --------------------------------------------------------------------------------------------------------


def test_calibrate_counts_right(tmp_path: Path) -> None:
    """Against NumPy: a product with a weight, one by a turned weight, one without, a sum, and a state."""
    rng = np.random.default_rng(0)
    weight, turned = (rng.standard_normal(shape).astype(np.float32) for shape in ((6, 5), (4, 5)))
    nodes = [
        helper.make_node("MatMul", ["x", "weight"], ["h"], name="first"),
        helper.make_node("Add", ["h", "past_state"], ["present_state"]),
        helper.make_node("Transpose", ["turned"], ["back"], perm=[1, 0]),
        helper.make_node("MatMul", ["present_state", "back"], ["y"], name="second"),
        helper.make_node("Transpose", ["y"], ["yt"], perm=[0, 2, 1]),
        helper.make_node("MatMul", ["yt", "y"], ["z"], name="no weight"),
    ]
    shapes = {"x": [2, 3, 6], "past_state": [2, 3, 5], "z": [2, 4, 4], "present_state": [2, 3, 5]}
    infos = {name: helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in shapes.items()}
    graph = helper.make_graph(
        nodes,
        "small",
        [infos["x"], infos["past_state"]],
        [infos["z"], infos["present_state"]],
        [numpy_helper.from_array(weight, "weight"), numpy_helper.from_array(turned, "turned")],
    )
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10),
        tmp_path / "m.onnx",
        save_as_external_data=True,
        size_threshold=0,
        location="m.data",
    )
    xs = [rng.standard_normal((2, 3, 6)).astype(np.float32) for _ in range(2)]
    for number, x in enumerate(xs):
        np.savez(tmp_path / f"{number}.npz", x=x, past_state=np.ones((2, 3, 5), np.float32))
    out = tmp_path / "stats.npz"
    code, found = as_json(
        "calibrate", tmp_path / "m.onnx", "-o", out, "-i", tmp_path / "0.npz", "-i", tmp_path / "1.npz"
    )
    assert code == 0 and found["sequences"] == 2
    made = load(out)
    assert {name: entry.kinds for name, entry in made.tensors.items()} == {
        "x": ["weight"],
        "present_state": ["cache", "weight"],
    }
    assert made.tensors["x"].users == [{"op_type": "MatMul", "name": "first", "input": 0}]
    states = [x @ weight + 1 for x in xs]
    for name, values in (("x", xs), ("present_state", states)):
        rows = np.concatenate([value.reshape(-1, value.shape[-1]) for value in values])
        entry = made.tensors[name]
        np.testing.assert_allclose(entry.amax, np.abs(rows).max(0), rtol=1e-5)
        np.testing.assert_allclose(entry.mean_square, np.square(rows).mean(0), rtol=1e-5)
        assert entry.rows == len(rows) == 12
        assert entry.tensor_amax == pytest.approx(np.abs(rows).max(), rel=1e-5)


def test_calibrate_exports(models: dict[str, Path], tmp_path: Path) -> None:
    """What a fused model and its export have in common has the same statistics; states of the cache are there."""
    found = {}
    for name in ("decode", "decode_fused"):
        result = call("calibrate", models[name], "-o", tmp_path / name, "--samples", 1, "--length", 6)
        assert result.exit_code == 0, result.output
        assert "inputs of products with weights and 4 states" in result.stdout
        found[name] = load(tmp_path / name).tensors
    common = set(found["decode"]) & set(found["decode_fused"])
    assert len(common) > 8
    for name in common:
        np.testing.assert_allclose(found["decode_fused"][name].amax, found["decode"][name].amax, rtol=1e-3, atol=1e-4)
    fused = [user for entry in found["decode_fused"].values() for user in entry.users]
    assert any(user["op_type"] == "KimiDeltaAttention" for user in fused)


def test_calibrate_refuses(models: dict[str, Path], tmp_path: Path, path: Path) -> None:
    result = call("calibrate", path, "-o", tmp_path / "s.npz")
    assert result.exit_code == 2 and "nothing to look at" in result.stderr
    result = call("calibrate", models["decode"], "-o", tmp_path / "no" / "s.npz")
    assert result.exit_code == 2 and "there is no folder" in result.stderr
    (tmp_path / "x.npz").write_text("")
    with pytest.raises(deltafuse.DeltaFuseError, match="no file of calibration statistics: it is no zip archive"):
        load(tmp_path / "x.npz")
    np.savez(tmp_path / "x.npz", other=np.zeros(3))
    whole = (tmp_path / "x.npz").read_bytes()
    (tmp_path / "cut.npz").write_bytes(whole[:-100])
    with pytest.raises(deltafuse.DeltaFuseError, match="no file of calibration statistics: File is not a zip file"):
        load(tmp_path / "cut.npz")
    result = call("calibrate", models["decode"], "-o", tmp_path / "s.npz", "-i", tmp_path / "cut.npz")
    assert result.exit_code == 2 and "cannot be read as a .npz file" in result.stderr
    with pytest.raises(deltafuse.DeltaFuseError, match="it has no array 'index'; `deltafuse calibrate` writes such"):
        load(tmp_path / "x.npz")


@pytest.mark.parametrize("command", ["calibrate", "run"])
def test_what_is_read_is_not_written_over(tmp_path: Path, command: str) -> None:
    model, weights, data = tmp_path / "m.onnx", tmp_path / "m.onnx.data", tmp_path / "in.npz"
    matrix = numpy_helper.from_array(np.ones((3, 3), np.float32), "w")
    ports = [[helper.make_tensor_value_info(name, TensorProto.FLOAT, (2, 3))] for name in "xy"]
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"])], "g", *ports, initializer=[matrix])
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    onnx.save(made, model, save_as_external_data=True, location=weights.name, size_threshold=0)
    np.savez(data, x=np.zeros((2, 3), np.float32))
    before = {path: path.read_bytes() for path in (model, weights, data)}
    for path in before:
        result = call(command, model, "--input", data, "-o", path)
        assert result.exit_code == 2 and "to another file" in result.stderr
    assert {path: path.read_bytes() for path in before} == before
    result = call(command, model, "--input", data, "-o", tmp_path / "out.npz")
    assert result.exit_code == 0, result.stderr


# -- all commands -----------------------------------------------------------------------------------------------------


def test_every_command_has_json_and_help() -> None:
    listed = re.findall(r"^. (\S+)", call("--help").stdout, re.MULTILINE)
    assert set(COMMANDS) <= set(listed)
    for name in COMMANDS:
        text = call(name, "--help").stdout
        assert "--json" in text, name
        assert "--quiet" in text or name in ("olive-config", "version"), name


def test_json_errors_are_one_object(tmp_path: Path) -> None:
    absent = tmp_path / "absent.onnx"
    for arguments in (
        ["fuse", absent, "-o", tmp_path / "o.onnx"],
        ["inspect", absent],
        ["verify", absent, absent],
        ["bench", absent],
        ["run", absent],
        ["calibrate", absent, "-o", tmp_path / "o.npz"],
    ):
        result = call(*arguments, "--json")
        assert result.exit_code == 2
        assert json.loads(result.stdout) == {"error": f"{absent}: no such file", "exit_code": 2}
        assert result.stderr == f"error: {absent}: no such file\n"


def test_exit_codes_are_those_of_the_readme() -> None:
    from deltafuse import cli_common

    readme = (Path(__file__).resolve().parents[2] / "plugin/deltafuse/README.md").read_text()
    table = re.search(r"\| exit code \|.*?\n\n", readme, re.DOTALL)
    assert table is not None
    said = {int(number) for number in re.findall(r"^\| (\d+) \|", table[0], re.MULTILINE)}
    codes = {value for name, value in vars(cli_common).items() if name.startswith("EXIT_")}
    assert said == codes | {0}


def test_completion() -> None:
    program = "import sys; sys.argv[0] = 'deltafuse'; from deltafuse.cli import app; app(prog_name='deltafuse')"
    environment = {
        **os.environ,
        "_DELTAFUSE_COMPLETE": "complete_bash",
        "COMP_WORDS": "deltafuse in",
        "COMP_CWORD": "1",
    }
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.stdout.split() == ["inspect"], done.stderr


def test_progress_of_long_work(models: dict[str, Path]) -> None:
    arguments = ["verify", str(models["prompt"]), str(models["prompt_fused"])]
    shown = runner.invoke(app, arguments, env={"FORCE_COLOR": "1"})
    assert "second model" in shown.stderr and "second model" not in shown.stdout
    assert runner.invoke(app, [*arguments, "-q"], env={"FORCE_COLOR": "1"}).stderr == ""
