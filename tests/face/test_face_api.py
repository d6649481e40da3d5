"""``deltafuse.fuse``: options, requirements, reports, and the kinds that go in and come out."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import deltafuse
import numpy as np
import onnx
import onnx_graphsurgeon as gs
import onnx_ir as ir
import pytest
from deltafuse import api, errors
from deltafuse.fusions.result import FusionReport
from deltafuse.registry.ops import OPS

from .kit import FakePipeline


def test_import_is_light() -> None:
    """``import deltafuse`` brings in neither onnx nor onnxruntime nor numpy, and all public names resolve."""
    heavy = ("onnx", "onnx_ir", "onnxruntime", "numpy", "rich")
    program = f"import sys, deltafuse; print(*[m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
    for name in deltafuse.__all__:
        assert getattr(deltafuse, name) is not None
    with pytest.raises(AttributeError, match="nothing_like_this"):
        deltafuse.nothing_like_this  # noqa: B018


def test_functions_are_not_hidden_by_modules() -> None:
    """Importing the module ``deltafuse.session`` first leaves ``deltafuse.session`` a function."""
    program = "import deltafuse.session, deltafuse; assert callable(deltafuse.session), deltafuse.session"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_path_to_path(pipeline: FakePipeline, path: Path, tmp_path: Path) -> None:
    before = path.read_bytes()
    report = deltafuse.fuse(path, tmp_path / "out.onnx", require={"kda": 2}, report=tmp_path / "report.json")
    assert path.read_bytes() == before
    assert report.count("kda") == 2 and report.output == str(tmp_path / "out.onnx")
    assert report.source == str(path) and report.input_kind == "path"
    assert (report.ir_version, report.opsets) == (10, {"": 20})
    properties = {p.key: p.value for p in onnx.load(tmp_path / "out.onnx").metadata_props}
    assert properties == {
        "author": "somebody",
        "deltafuse.version": deltafuse.__version__,
        "deltafuse.target": "plugin",
        "deltafuse.verified": "true",
        "deltafuse.fused": ", ".join(f"{op}={2 if op == 'kda' else 0}" for op in OPS),
    }
    written = json.loads((tmp_path / "report.json").read_text())
    assert written["regions"][0]["proof"]["error"] == 1.5e-7
    assert "model" not in written
    assert written["output_bytes"] == (tmp_path / "out.onnx").stat().st_size


def test_no_verify_is_recorded(pipeline: FakePipeline, path: Path) -> None:
    report = deltafuse.fuse(path, verify=False, target="portable")
    assert report.model is not None
    assert report.model.metadata_props["deltafuse.verified"] == "false: --no-verify"
    assert report.model.metadata_props["deltafuse.target"] == "portable"
    assert pipeline.calls == [{"verify": False, "target": "portable", "dry_run": False, "proof_budget": None}]


def test_nothing_fused_claims_no_proof(
    pipeline: FakePipeline, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nothing(model: ir.Model, **_: object) -> FusionReport:
        return FusionReport(model=model.clone(), verify=True)

    monkeypatch.setattr(api, "_pipeline", lambda: nothing)
    deltafuse.fuse(path, tmp_path / "out.onnx", report=tmp_path / "report.json")
    properties = {p.key: p.value for p in onnx.load(tmp_path / "out.onnx").metadata_props}
    assert properties["deltafuse.verified"] == "nothing fused"
    assert properties["deltafuse.fused"] == ", ".join(f"{op}=0" for op in OPS)


def test_what_was_fused_before_stays_on_record(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, proto: onnx.ModelProto
) -> None:
    """A second run, to quantize for example, finds nothing new; the model's metadata still say what is in it."""

    def nothing(model: ir.Model, **_: object) -> FusionReport:
        return FusionReport(model=model.clone(), verify=True)

    monkeypatch.setattr(api, "_pipeline", lambda: nothing)
    op = OPS["kda"]
    proto.graph.node.append(onnx.helper.make_node(op.op_type, [proto.graph.input[0].name], ["f"], domain=op.domain))
    for verified in ("true", "false: --no-verify"):
        onnx.helper.set_model_props(proto, {"deltafuse.verified": verified, "deltafuse.fused": "kda=1"})
        report = deltafuse.fuse(proto)
        assert report.already_fused == {"kda": 1} and report.count("kda") == 0 and report.model is not None
        assert report.model.metadata_props["deltafuse.verified"] == verified
        assert "kda=1" in report.model.metadata_props["deltafuse.fused"]


def test_each_kind_comes_back(pipeline: FakePipeline, path: Path, proto: onnx.ModelProto) -> None:
    model = ir.from_proto(proto)
    graph = gs.import_onnx(proto)
    before = proto.SerializeToString()
    for source, kind in ((proto, onnx.ModelProto), (model, ir.Model), (graph, gs.Graph), (path, ir.Model)):
        report = deltafuse.fuse(source)
        assert isinstance(report.result(), kind)
        assert report.result() is not source
        assert [n.op_type for n in report.to_proto().graph.node] == ["Add"]
        assert [n.op for n in report.to_graphsurgeon().nodes] == ["Add"]
    assert proto.SerializeToString() == before
    assert "deltafuse.version" not in model.metadata_props


def test_graphsurgeon_and_overloads(pipeline: FakePipeline, proto: onnx.ModelProto) -> None:
    """graph-surgeon drops overloads: one body of an op survives it, several are refused."""
    helper = onnx.helper

    def with_bodies(*overloads: str) -> onnx.ModelProto:
        model = onnx.ModelProto()
        model.CopyFrom(proto)
        model.opset_import.append(helper.make_opsetid("deltafuse", 1))
        del model.graph.node[:]
        previous = "x"
        for i, overload in enumerate(overloads):
            result = "y" if i == len(overloads) - 1 else f"t{i}"
            call = helper.make_node("F", [previous, "w"], [result], domain="deltafuse", overload=overload)
            model.graph.node.append(call)
            body = [helper.make_node("Add", ["a", "b"], ["c"])]
            function = helper.make_function(
                "deltafuse", "F", ["a", "b"], ["c"], body, [helper.make_opsetid("", 20)], overload=overload
            )
            model.functions.append(function)
            previous = result
        return model

    one = deltafuse.fuse(with_bodies("h4")).to_graphsurgeon()
    back = gs.export_onnx(one)
    onnx.checker.check_model(back)
    assert back.graph.node[0].op_type == "F" and len(back.functions) == 1
    with pytest.raises(errors.OutputError, match="several of F: use to_proto"):
        deltafuse.fuse(with_bodies("h4", "h8")).to_graphsurgeon()


def test_unmet_requirement_writes_the_report_only(pipeline: FakePipeline, path: Path, tmp_path: Path) -> None:
    with pytest.raises(errors.RequirementError, match=r"required kda=3, fused 2.*relative error 3.1e-02") as caught:
        deltafuse.fuse(path, tmp_path / "out.onnx", require={"kda": 3}, report=tmp_path / "report.json")
    assert caught.value.missing == {"kda": (3, 2)} and caught.value.report.count("kda") == 2
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in.onnx", "report.json"]


def test_dry_run(pipeline: FakePipeline, path: Path, tmp_path: Path) -> None:
    report = deltafuse.fuse(path, dry_run=True, require={"kda": 2})
    assert report.dry_run and [p.name for p in tmp_path.iterdir()] == ["in.onnx"]
    assert api.found(report, "kda") == 2
    with pytest.raises(errors.OutputError, match="dry run"):
        report.to_proto()
    with pytest.raises(errors.RequirementError, match="required kda=3, recognised 2"):
        deltafuse.inspect(path, require={"kda": 3})
    assert pipeline.calls[0]["verify"] is True and pipeline.calls[1]["verify"] is False


def test_bad_options(pipeline: FakePipeline, path: Path, tmp_path: Path) -> None:
    bad: list[tuple[dict[str, object], str]] = [
        ({"target": "cuda"}, "target 'cuda': expected one of plugin, portable"),
        ({"require": {"mamba": 1}}, "expected an op among kda"),
        ({"require": {"kda": -1}}, "whole number"),
        ({"require": {"kda": True}}, "whole number"),
        ({"proof_memory": "lots"}, "expected a size such as 4GiB"),
        ({"proof_memory": 0}, "more than 0 bytes"),
        ({"proof_memory": [4]}, "expected a number of bytes"),
        ({"proof_seconds": 0}, "more than 0"),
        ({"proof_seconds": "60"}, "proof seconds '60': expected a number"),
        ({"require": "kda=1"}, "require 'kda=1': expected a mapping of op and count, such as {'kda': 1}"),
        ({"require": ["kda"]}, "expected a mapping"),
        ({"fusions": ["kda"], "require": {"kda": 1, "moe": 1}}, "require moe=1: of the fusions, kda alone would be"),
        ({"target": ["plugin"]}, "expected one of plugin, portable"),
        ({"output": 3}, "output 3: expected a path"),
        ({"report": b"r.json"}, "report b'r.json': expected a path"),
        ({"base_dir": 1.5}, "base_dir 1.5: expected a path"),
        ({"dry_run": True, "output": tmp_path / "o.onnx"}, "dry run writes no model"),
    ]
    for options, expected in bad:
        with pytest.raises(errors.OptionError, match=re.escape(expected)):
            deltafuse.fuse(path, **options)  # type: ignore[arg-type]
    assert pipeline.calls == []


def test_output_is_checked_before_the_work(pipeline: FakePipeline, path: Path, tmp_path: Path) -> None:
    for options in ({"output": tmp_path / "absent" / "o.onnx"}, {"report": tmp_path}):
        with pytest.raises(errors.OutputError):
            deltafuse.fuse(path, **options)  # type: ignore[arg-type]
    assert pipeline.calls == []


def test_onnxruntime_is_checked(pipeline: FakePipeline, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import onnxruntime

    monkeypatch.setattr(onnxruntime, "__version__", "1.26.0")
    with pytest.raises(errors.OrtError, match=r"need onnxruntime 1\.27 or newer, found 1\.26\.0"):
        deltafuse.fuse(path)
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    for verify in (True, False):  # recognising runs the model's regions too
        with pytest.raises(errors.OrtError, match="pip install onnxruntime"):
            deltafuse.fuse(path, verify=verify)
    assert pipeline.calls == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [("4GiB", 4 << 30), ("512 MiB", 512 << 20), ("1.5g", 3 << 29), ("64B", 64), (7, 7), ("2K", 2048)],
)
def test_sizes(text: str | int, expected: int) -> None:
    assert api.parse_bytes(text) == expected


def test_json_is_strict(pipeline: FakePipeline, path: Path) -> None:
    report = deltafuse.fuse(path)
    report.regions[0].proof.error = float("nan")  # type: ignore[union-attr]
    assert json.loads(report.to_json())["regions"][0]["proof"]["error"] is None


def test_failures_on_invalid_models_are_explained(pipeline: FakePipeline, path: Path, proto: onnx.ModelProto) -> None:
    """An unexpected error is the model's fault where onnx.checker says so, and stays itself where not."""
    pipeline.error = KeyError("axis")
    with pytest.raises(KeyError):
        deltafuse.fuse(path)
    proto.graph.node[0].input.append("x")  # Add takes two
    path.write_bytes(proto.SerializeToString())
    for source in (path, proto):
        with pytest.raises(errors.NotOnnxError, match=r"is not valid ONNX: .*\(so fusing it failed: 'axis'\)"):
            deltafuse.fuse(source)


def test_failures_on_valid_models_stay_themselves(pipeline: FakePipeline, path: Path, proto: onnx.ModelProto) -> None:
    """Shape tensors in external files are valid, though onnx's own full check cannot read them there."""
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.array([-1]), "flat"))
    proto.graph.node.append(onnx.helper.make_node("Reshape", ["y", "flat"], ["z"]))
    proto.graph.output.append(onnx.helper.make_tensor_value_info("z", onnx.TensorProto.FLOAT, ["n"]))
    onnx.save(proto, path, save_as_external_data=True, location="in.data", size_threshold=0)
    pipeline.error = KeyError("axis")
    outside = onnx.load(path, load_external_data=False)
    for source, how in ((path, {}), (ir.load(path), {}), (outside, {"base_dir": path.parent})):
        with pytest.raises(KeyError):
            deltafuse.fuse(source, **how)  # type: ignore[arg-type]


def test_modules_are_there_without_an_import() -> None:
    code = "import deltafuse; print(deltafuse.compare.compare, deltafuse.show.print_report, deltafuse.calibration.load)"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
