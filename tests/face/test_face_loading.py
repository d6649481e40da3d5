"""Bad input of every kind gives one clear error; good input of every kind gives a model."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx_graphsurgeon as gs
import onnx_ir as ir
import pytest
from deltafuse import external_data, model_io
from deltafuse.errors import (
    DeltaFuseError,
    ExternalDataError,
    ModelFileError,
    ModelKindError,
    NotOnnxError,
    OpsetError,
    TruncatedModelError,
)

from .kit import small_model

GARBAGE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is empty"),
    "text": (b"hello world, this is no model\n" * 20, "is not an ONNX model"),
    "zeros": (bytes(1000), "is not an ONNX model"),
    "html": (b"<!DOCTYPE html><html></html>", "HTML page"),
    "lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 12\n", "Git LFS pointer"),
    "zip": (b"PK\x03\x04" + bytes(60), "zip archive"),
    "gzip": (b"\x1f\x8b" + bytes(60), "gzip"),
    "xz": (b"\xfd7zXZ\x00" + bytes(60), "xz"),
    "safetensors": ((50).to_bytes(8, "little") + b'{"a":{}}' + bytes(90), "safetensors"),
    # these parse as a ModelProto without complaint
    "one-varint": (b"\x08\x0a", "holds no graph"),
    "unknown-field": (b"\x52\x03abc", "first field has number 10"),
    "no-graph": (b"\x08\x0a\x12\x04test", "holds no graph"),
}


@pytest.mark.parametrize("name", GARBAGE)
def test_not_onnx(tmp_path: Path, name: str) -> None:
    content, expected = GARBAGE[name]
    file = tmp_path / "bad.onnx"
    file.write_bytes(content)
    with pytest.raises(NotOnnxError, match=expected) as caught:
        model_io.load(file)
    assert "bad.onnx" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("keep", [0.02, 0.3, 0.7, 0.97, 0.999])
def test_truncated(path: Path, keep: float) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * keep)])
    with pytest.raises(TruncatedModelError if keep > 0.02 else ModelFileError, match=r"truncated|in\.onnx"):
        model_io.load(path)


def test_every_truncation_is_an_error(path: Path) -> None:
    """No prefix of the file loads, raises anything else, or is taken for a whole model."""
    model = small_model(elements=4)
    del model.metadata_props[:]  # all that could follow the parts that a model cannot be without
    content = model.SerializeToString()
    for size in range(len(content)):
        path.write_bytes(content[:size])
        with pytest.raises(DeltaFuseError):
            model_io.load(path)


def test_damage_inside_is_an_error_or_a_model(path: Path) -> None:
    """Flipped bytes give a DeltaFuseError or load: nothing else is raised."""
    content = bytearray(small_model(elements=4).SerializeToString())
    loaded = 0
    for position in range(len(content)):
        damaged = bytearray(content)
        damaged[position] ^= 0xFF
        path.write_bytes(bytes(damaged))
        try:
            model_io.load(path)
            loaded += 1
        except DeltaFuseError:
            pass
    assert loaded < len(content)


def test_missing_directory_and_unreadable(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="no such file"):
        model_io.load(tmp_path / "absent.onnx")
    (tmp_path / "model.onnx").write_bytes(b"x")
    with pytest.raises(ModelFileError, match=r"is a directory: expected an ONNX file; it holds model\.onnx"):
        model_io.load(tmp_path)
    with pytest.raises(ModelFileError, match="not a regular file"):
        model_io.load(os.devnull)


@pytest.mark.parametrize("value", [3, None, b"model.onnx", ["a.onnx"]])
def test_other_kinds(value: object) -> None:
    with pytest.raises(ModelKindError, match=r"expected a path, an onnx\.ModelProto"):
        model_io.load(value)


def test_weights_that_a_caller_may_replace_are_said() -> None:
    model = small_model()
    model.graph.input.append(onnx.helper.make_tensor_value_info("w", onnx.TensorProto.FLOAT, [1024]))
    (warning,) = model_io.load(model).warnings
    assert "1 of the weights are graph inputs too (such as 'w')" in warning


def test_opsets(proto: onnx.ModelProto) -> None:
    for opset in (18, 27):
        assert model_io.load(small_model(opset)).warnings == []
    with pytest.raises(OpsetError, match="has opset 17; expected opset 18 to 27"):
        model_io.load(small_model(17))
    newest = onnx.defs.onnx_opset_version()
    if newest > 27:
        assert "newer than deltafuse was tested with" in model_io.load(small_model(newest)).warnings[0]
    with pytest.raises(OpsetError, match="newer than the installed onnx knows"):
        model_io.load(small_model(max(newest, 27) + 1))
    proto.opset_import[0].domain = "com.microsoft"
    with pytest.raises(OpsetError, match=r"imports no opset of the default ONNX domain \(imported: com\.microsoft\)"):
        model_io.load(proto)


def test_empty_graph(proto: onnx.ModelProto) -> None:
    del proto.graph.node[:]
    with pytest.raises(NotOnnxError, match="empty graph"):
        model_io.load(proto)


def test_kinds(path: Path, proto: onnx.ModelProto) -> None:
    sources: dict[str, object] = {"proto": proto, "ir": ir.from_proto(proto), "graphsurgeon": gs.import_onnx(proto)}
    for kind, source in sources.items():
        loaded = model_io.load(source)
        assert loaded.kind == kind and loaded.path is None
        assert [node.op_type for node in loaded.model.graph] == ["Add"]
    for source in (path, str(path)):
        loaded = model_io.load(source)
        assert loaded.kind == "path" and loaded.path == path


def test_external_data_stay_external(external_path: Path) -> None:
    tensors = list(external_data.external_tensors(model_io.load(external_path).model))
    assert [t.name for t in tensors] == ["w"] and tensors[0].numpy()[5] == 5


def test_external_data_in_the_current_folder(external_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(external_path.parent)
    assert next(external_data.external_tensors(model_io.load("in.onnx").model)).numpy()[5] == 5


def test_proto_with_external_data_needs_its_folder(external_path: Path) -> None:
    proto = onnx.load(external_path, load_external_data=False)
    with pytest.raises(ExternalDataError, match=r"'w': its external data file .*in\.onnx\.data is missing"):
        model_io.load(proto)
    assert model_io.load(proto, base_dir=external_path.parent)


def edit(name: str, value: str) -> Callable[[Path], None]:
    """Set a field of the weight's external data description."""

    def change(path: Path) -> None:
        proto = onnx.load(path, load_external_data=False)
        entries = {e.key: e.value for e in proto.graph.initializer[0].external_data}
        entries[name] = value
        del proto.graph.initializer[0].external_data[:]
        for key, text in entries.items():
            proto.graph.initializer[0].external_data.add(key=key, value=text)
        path.write_bytes(proto.SerializeToString())

    return change


def shorten(path: Path) -> None:
    os.truncate(f"{path}.data", 4000)


def remove(path: Path) -> None:
    os.unlink(f"{path}.data")


def replace_by_folder(path: Path) -> None:
    remove(path)
    os.mkdir(f"{path}.data")


def link_outside(path: Path) -> None:
    outside = path.parent.parent / f"{path.parent.name}.outside"
    os.rename(f"{path}.data", outside)
    os.symlink(outside, f"{path}.data")


EXTERNAL: dict[str, tuple[Callable[[Path], None], str]] = {
    "missing": (remove, "is missing; it belongs in the model's folder"),
    "short": (shorten, r"expected bytes 0 to 4,096 of .*in\.onnx\.data, which has 4,000"),
    "offset": (edit("offset", "4096"), r"expected bytes 4,096 to 8,192 of .*, which has 4,096"),
    "length": (edit("length", "100"), r"100 bytes of external data .*, but FLOAT\[1024\] needs 4,096"),
    "folder": (replace_by_folder, "not a regular file"),
    "outside": (edit("location", "../in.onnx.data"), "missing|outside the model's folder"),
    "symlink": (link_outside, r"lies outside the model's folder.*cp -L"),
}


@pytest.mark.parametrize("name", EXTERNAL)
def test_bad_external_data(external_path: Path, name: str) -> None:
    damage, expected = EXTERNAL[name]
    damage(external_path)
    with pytest.raises(ExternalDataError, match=expected) as caught:
        model_io.load(external_path)
    assert "'w'" in str(caught.value)


def dangle(graph: onnx.GraphProto) -> None:
    graph.node[0].input[1] = "nowhere"


def disorder(graph: onnx.GraphProto) -> None:
    graph.node.insert(0, onnx.helper.make_node("Neg", ["y"], ["z"], name="early"))


def define_twice(graph: onnx.GraphProto) -> None:
    graph.node.append(graph.node[0])


def lose_the_output(graph: onnx.GraphProto) -> None:
    graph.output[0].name = "absent"


def wrong_size(graph: onnx.GraphProto) -> None:
    graph.initializer[0].dims[0] = 1025


def no_data(graph: onnx.GraphProto) -> None:
    graph.initializer[0].ClearField("raw_data")


def dangle_inside(graph: onnx.GraphProto) -> None:
    body = onnx.helper.make_graph(
        [onnx.helper.make_node("Neg", ["nowhere"], ["b"], name="inner")],
        "body",
        [],
        [onnx.helper.make_tensor_value_info("b", 1, None)],
    )
    graph.initializer.append(onnx.helper.make_tensor("c", onnx.TensorProto.BOOL, [], [True]))
    graph.node.append(onnx.helper.make_node("If", ["c"], ["u"], then_branch=body, else_branch=body))


BROKEN: dict[str, tuple[Callable[[onnx.GraphProto], None], str]] = {
    "dangling": (dangle, r"node 'add' \(Add\) uses 'nowhere', which nothing defines"),
    "order": (disorder, "node 'early' .* uses 'y', which only a later node defines"),
    "twice": (define_twice, "is damaged"),
    "output": (lose_the_output, "nothing defines its output 'absent'|is damaged"),
    "size": (wrong_size, r"tensor 'w' has 4,096 bytes, but FLOAT\[1025\] needs 4,100"),
    "no data": (no_data, "tensor 'w' has no data"),
    "inside": (dangle_inside, "node 'inner' .* uses 'nowhere', which nothing defines"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_graphs(path: Path, proto: onnx.ModelProto, name: str, caplog: pytest.LogCaptureFixture) -> None:
    damage, expected = BROKEN[name]
    damage(proto.graph)
    path.write_bytes(proto.SerializeToString())
    with pytest.raises(NotOnnxError, match=expected):
        model_io.load(path)
    assert not caplog.records, "the error is the only line"


def test_small_external_tensors_are_read(external_path: Path) -> None:
    """Shapes and scalars must be known to shape inference; weights stay where they are, a caller's model as it is."""
    proto = onnx.load(external_path)
    shape = onnx.numpy_helper.from_array(np.array([-1, 1024], np.int64), "shape")
    proto.graph.initializer.append(shape)
    constant = onnx.helper.make_node(
        "Constant", [], ["axes"], value=onnx.numpy_helper.from_array(np.array([0]), "axes")
    )
    nodes = [constant, onnx.helper.make_node("Reshape", ["y", "shape"], ["z"]), *proto.graph.node]
    del proto.graph.node[:]
    proto.graph.node.extend([nodes[2], nodes[1], nodes[0]])
    onnx.save(
        proto,
        external_path,
        save_as_external_data=True,
        location="in.onnx.data",
        size_threshold=0,
        convert_attribute=True,
    )
    outside = [*onnx.load(external_path, load_external_data=False).graph.initializer]
    assert all(tensor.data_location == onnx.TensorProto.EXTERNAL for tensor in outside)
    loaded = model_io.load(external_path)
    assert [t.name for t in external_data.external_tensors(loaded.model)] == ["w"]
    found = loaded.model.graph.initializers["shape"].const_value
    assert found is not None and found.numpy().tolist() == [-1, 1024]
    assert loaded.data_files == {str((external_path.parent / "in.onnx.data").resolve())}

    own = ir.load(external_path)
    assert [t.name for t in external_data.external_tensors(model_io.load(own).model)] == ["w"]
    assert len(list(external_data.external_tensors(own))) == 3
