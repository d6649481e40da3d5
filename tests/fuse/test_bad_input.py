"""Files that are no models, and models odd around or inside a KDA block: a clear message or a correct result."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import deltafuse
import numpy as np
import onnx
import onnx_ir as ir
import pytest
from deltafuse import errors
from deltafuse.cli import app
from exports import library
from mutants.editor import Editor
from onnx import TensorProto, helper
from typer.testing import CliRunner

from . import kit

STEP = "kda_decode_T1"
runner = CliRunner()


# ---- files


def not_onnx(path: Path) -> None:
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * 8)


def text(path: Path) -> None:
    path.write_text("{'model': 'not here'}\n" * 50)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def half(path: Path) -> None:
    raw = library.export(STEP).proto().SerializeToString()
    path.write_bytes(raw[: len(raw) // 2])


def last_bytes_missing(path: Path) -> None:
    path.write_bytes(library.export(STEP).proto().SerializeToString()[:-10])


def data_missing(path: Path) -> None:
    onnx.save(library.export(STEP).proto(), path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    (path.parent / "weights.bin").unlink()


def data_short(path: Path) -> None:
    onnx.save(library.export(STEP).proto(), path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    data = path.parent / "weights.bin"
    data.write_bytes(data.read_bytes()[:1000])


def old_opset(path: Path) -> None:
    model = library.export(STEP).proto()
    model.opset_import[0].version = 13
    onnx.save(model, path)


def future_opset(path: Path) -> None:
    model = library.export(STEP).proto()
    model.opset_import[0].version = 99
    onnx.save(model, path)


FILES: dict[str, tuple[Callable[[Path], None], type[errors.DeltaFuseError], str]] = {
    "not_onnx": (not_onnx, errors.NotOnnxError, "not an ONNX model"),
    "text": (text, errors.NotOnnxError, "not an ONNX model"),
    "empty": (empty, errors.ModelFileError, "empty"),
    "half": (half, errors.TruncatedModelError, "ends too early|truncated|ends"),
    "last_bytes_missing": (last_bytes_missing, errors.TruncatedModelError, "ends too early|truncated|ends"),
    "data_missing": (data_missing, errors.ExternalDataError, "weights.bin"),
    "data_short": (data_short, errors.ExternalDataError, "weights.bin"),
    "old_opset": (old_opset, errors.OpsetError, "13"),
    "future_opset": (future_opset, errors.OpsetError, "99"),
}


@pytest.mark.parametrize("name", FILES)
def test_bad_files_give_one_clear_line(name: str, tmp_path: Path) -> None:
    """The library raises a class of its own; the command prints one line, exits with 2 and leaves no file."""
    spoil, kind, message = FILES[name]
    path, output = tmp_path / "in.onnx", tmp_path / "out.onnx"
    spoil(path)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(kind, match=message):
        deltafuse.fuse(path, output)
    done = runner.invoke(app, ["fuse", str(path), "-o", str(output)])
    assert done.exit_code == 2
    assert done.stderr.startswith("error: ")
    assert len(done.stderr.strip().splitlines()) == 1
    assert "Traceback" not in done.output
    assert sorted(tmp_path.iterdir()) == before


def test_weights_outside_input_and_output_the_same_file(tmp_path: Path) -> None:
    """The new weights go beside the file; the old ones are not needed any more; what it computes is kept."""
    path = tmp_path / "model.onnx"
    before = library.export("hybrid4_prefill").proto()
    outside = onnx.ModelProto.FromString(before.SerializeToString())
    onnx.save(outside, path, save_as_external_data=True, location="old.bin", size_threshold=256)
    report = deltafuse.fuse(path, path, require={"kda": 3})
    assert report.count("kda") == 3
    (tmp_path / "old.bin").unlink()
    feeds = library.export("hybrid4_prefill").feeds()
    truth, found = library.run(before, feeds), library.run(path, feeds)
    assert library.worst(found, truth)[0] < 1e-4
    assert all(p.suffix in (".onnx", ".data") for p in tmp_path.iterdir())


def test_too_few_fused_writes_nothing(tmp_path: Path) -> None:
    path, output = tmp_path / "in.onnx", tmp_path / "out.onnx"
    onnx.save(library.export(STEP).proto(), path)
    with pytest.raises(errors.RequirementError):
        deltafuse.fuse(path, output, require={"kda": 2})
    done = runner.invoke(app, ["fuse", str(path), "-o", str(output), "--require", "kda=2"])
    assert done.exit_code == 1
    assert not output.exists()


# ---- unknown operators


def stand_in(model: onnx.ModelProto, op: str) -> onnx.ModelProto:
    """The model with the unknown operator replaced by one that ORT runs."""
    copy = onnx.ModelProto.FromString(model.SerializeToString())
    for node in copy.graph.node:
        if node.domain == "acme":
            node.domain, node.op_type = "", op
            del node.attribute[:]
    kept = [o for o in copy.opset_import if o.domain != "acme"]
    del copy.opset_import[:]
    copy.opset_import.extend(kept)
    return copy


def with_unknown(values: list[str]) -> onnx.ModelProto:
    """An ``acme::Mystery`` behind each of these values."""
    editor = Editor(library.export(STEP).proto())
    for value in values:
        editor.declare(editor.after(value, "Mystery", domain="acme", secret=7), value)
    editor.model.opset_import.append(helper.make_opsetid("acme", 1))
    return editor.done()


@pytest.mark.parametrize(
    "where",
    [
        ["linear", "linear_4", "linear_5"],  # behind projections: outside of the block
        ["mul_11"],  # behind the gated norm
        ["silu_1"],  # between convolution and norm of the key
        ["mul"],  # the log decay
        ["sigmoid"],  # beta
        ["select_scatter"],  # between recurrence and norm
        ["exp_1"],  # the decay
        ["mul_6"],  # the decayed state, in the middle of the recurrence
    ],
    ids=lambda where: "+".join(where),
)
def test_unknown_operators_are_left_alone(where: list[str]) -> None:
    before = with_unknown(where)
    report, after = kit.fuse(before)
    if "mul_6" in where or "exp_1" in where:
        assert report.count("kda") == 0
    if where == ["mul_11"] or "linear" in where:
        assert report.count("kda") == 1, kit.why(report)
    mysteries = [n for n in after.graph.node if n.domain == "acme"]
    assert len(mysteries) == len(where)
    assert all(n.attribute[0].i == 7 for n in mysteries)
    assert any(o.domain == "acme" for o in after.opset_import)
    feeds = library.export(STEP).feeds()
    for op in ("Identity", "Neg" if where != ["exp_1"] else "Abs"):
        kit.same(stand_in(before, op), stand_in(after, op), feeds)


# ---- values inside a block that others want too


INNER = [
    "silu",
    "transpose_1",
    "view_1",
    "mul_3",
    "add",
    "softplus",
    "mul",
    "sigmoid",
    "mul_6",
    "sub",
    "einsum_1",
    "mul_9",
    "sigmoid_1",
]


@pytest.mark.parametrize("value", INNER)
def test_graph_outputs_inside_a_block_are_kept(value: str) -> None:
    editor = Editor(library.export(STEP).proto())
    editor.expose(value)
    before = editor.done()
    _, after = kit.fuse(before)
    assert [o.name for o in after.graph.output] == [o.name for o in before.graph.output]
    kit.same(before, after, library.export(STEP).feeds())


@pytest.mark.parametrize("value", INNER)
def test_second_consumers_are_served(value: str) -> None:
    editor = Editor(library.export(STEP).proto())
    editor.expose(editor.make("Neg", value), value)
    before = editor.done()
    _, after = kit.fuse(before)
    kit.same(before, after, library.export(STEP).feeds())


def test_a_scan_whose_rows_another_node_reads() -> None:
    editor = Editor(library.export("kda_scan_dynT").proto())
    editor.expose(editor.make("Neg", "getitem_1"), "getitem_1")
    before = editor.done()
    _, after = kit.fuse(before)
    kit.same(before, after, *(library.export("kda_scan_dynT").feeds({"s27": tokens}) for tokens in (1, 9)))


# ---- weights


def test_shared_initializers() -> None:
    """Every layer reads the first one's weights, and the norm's weight is read by a stranger too."""
    model = library.export("hybrid4_decode").proto()
    editor = Editor(model)
    by_shape: dict[tuple[int, ...], str] = {}
    table = {}
    for tensor in model.graph.initializer:
        if tensor.data_type == TensorProto.FLOAT and len(tensor.dims) >= 1 and np.prod(tensor.dims) > 2:
            table[tensor.name] = by_shape.setdefault(tuple(tensor.dims), tensor.name)
    for node in editor.graph.node:
        node.input[:] = [table.get(name, name) for name in node.input]
    norm = next(n for n in table.values() if n.endswith("o_norm.weight"))
    editor.graph.output.append(helper.make_tensor_value_info(editor.make("Neg", norm), TensorProto.FLOAT, [8]))
    before = editor.done()
    report, after = kit.fuse(before)
    assert report.count("kda") == 3, kit.why(report)
    kit.same(before, after, library.export("hybrid4_decode").feeds())


@pytest.mark.parametrize("name", ["dt_bias", "neg", "k_conv1d.weight", "o_norm.weight", "val_89", "val_87"])
@pytest.mark.parametrize("default", [True, False], ids=["with-default", "input-only"])
def test_weights_that_are_inputs_are_not_constants(name: str, default: bool) -> None:
    """An initializer that is a graph input too can be given another value at run time: it must not be folded away."""
    model = library.export(STEP).proto()
    tensor = next(t for t in model.graph.initializer if t.name == name)
    value = onnx.numpy_helper.to_array(tensor)
    model.graph.input.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, list(tensor.dims)))
    if not default:
        model.graph.initializer.remove(tensor)
    feeds = library.export(STEP).feeds()
    _, after = kit.fuse(model)
    kit.same(model, after, *({**feeds, name: np.asarray(value * factor, np.float32)} for factor in (1.0, 1.7)))


# ---- other oddities


def test_a_block_inside_a_branch_is_left_right() -> None:
    """The whole layer as the body of an If."""
    layer = library.export(STEP).proto()
    branches = []
    for prefix in ("then", "else"):
        body = onnx.GraphProto()
        body.name = prefix
        body.node.extend(layer.graph.node)
        body.output.extend(layer.graph.output)
        inner = {o for n in body.node for o in n.output}
        for node in body.node:
            node.input[:] = [f"{prefix}_{n}" if n in inner else n for n in node.input]
            node.output[:] = [f"{prefix}_{n}" for n in node.output]
        for value in body.output:
            value.name = f"{prefix}_{value.name}"
        branches.append(body)
    outputs = [o.name for o in layer.graph.output]
    chosen = helper.make_node("If", ["which"], outputs, then_branch=branches[0], else_branch=branches[1])
    graph = helper.make_graph(
        [chosen],
        "branched",
        [*layer.graph.input, helper.make_tensor_value_info("which", TensorProto.BOOL, [])],
        layer.graph.output,
        layer.graph.initializer,
    )
    before = helper.make_model(graph, opset_imports=layer.opset_import, ir_version=layer.ir_version)
    _, after = kit.fuse(before)
    kit.same(before, after, {**library.export(STEP).feeds(), "which": np.array(True)})


def test_float64_is_refused() -> None:
    """The op takes float32, float16 and bfloat16; a float64 layer stays what it is."""
    model = library.export("kda_stack_T8").proto()
    del model.graph.value_info[:]
    for value in [*model.graph.input, *model.graph.output]:
        value.type.tensor_type.elem_type = TensorProto.DOUBLE
    for tensor in model.graph.initializer:
        if tensor.data_type == TensorProto.FLOAT:
            array = onnx.numpy_helper.to_array(tensor).astype(np.float64)
            tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))
    report, after = kit.fuse(model)
    assert report.count("kda") == 0
    assert kit.calls(after) == 0


def test_unknown_shapes_on_inputs() -> None:
    """Inputs with no declared sizes but the last: nothing static helps, results stay the same."""
    export = library.export("conv3_scan_states_batch2")
    model = export.proto()
    for value in model.graph.input:
        for index, dim in enumerate(value.type.tensor_type.shape.dim):
            if index < 2 and value.name == "x":
                dim.Clear()
    del model.graph.value_info[:]
    _, after = kit.fuse(model)
    kit.same(model, after, export.feeds({"T": 5}))


def test_metadata_of_the_model_is_kept(tmp_path: Path) -> None:
    model = library.export(STEP).proto()
    helper.set_model_props(model, {"author": "somebody", "step": "17"})
    model.doc_string, model.producer_name, model.model_version = "a layer", "exporter", 3
    report = deltafuse.fuse(model, tmp_path / "out.onnx")
    written = onnx.load(tmp_path / "out.onnx")
    kept = {p.key: p.value for p in written.metadata_props}
    assert kept["author"] == "somebody"
    assert kept["step"] == "17"
    assert (written.doc_string, written.producer_name, written.model_version) == ("a layer", "exporter", 3)
    assert report.count("kda") == 1


def test_missing_node_names() -> None:
    model = library.export("hybrid4_decode").proto()
    for node in model.graph.node[::2]:
        node.name = ""
    report, after = kit.fuse(model)
    assert report.count("kda") == 3, kit.why(report)
    kit.same(model, after, library.export("hybrid4_decode").feeds())


def test_a_value_that_bears_the_fused_nodes_names() -> None:
    """Fusing a model twice removed: names that deltafuse gives are taken already."""
    _, _, once = kit.fused("hybrid4_decode")
    fresh = [v for n in once.graph.node if n.domain == "deltafuse" for v in [*n.output, n.name]]
    model = library.export("hybrid4_decode").proto()
    editor = Editor(model)
    outputs = {o.name for o in model.graph.output}
    for name in (n for n in fresh if n and n not in outputs):
        if not any(name in node.output for node in editor.graph.node):
            editor.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(1, np.float32), name))
            extra = editor.make("Neg", name)
            editor.graph.output.append(helper.make_tensor_value_info(extra, TensorProto.FLOAT, [1]))
    before = editor.done()
    report, after = kit.fuse(before)
    assert report.count("kda") == 3
    onnx.checker.check_model(after)
    kit.same(before, after, library.export("hybrid4_decode").feeds())
    assert isinstance(report.model, ir.Model)
