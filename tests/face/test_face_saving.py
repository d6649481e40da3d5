"""What is saved is whole, or is not there; external data are streamed and never clobbered."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from deltafuse import external_data, model_io, model_save
from deltafuse.errors import OutputError

from .kit import small_model


def run(path: Path) -> np.ndarray:
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (result,) = session.run(None, {"x": np.ones((2, 1024), np.float32)})
    return np.asarray(result)


EXPECTED = np.broadcast_to(1 + np.arange(1024, dtype=np.float32), (2, 1024))


def test_everything_is_preserved(path: Path, proto: onnx.ModelProto, tmp_path: Path) -> None:
    out = tmp_path / "out.onnx"
    saved = model_save.save(model_io.load(path).model, out)
    result = onnx.load(out)
    assert saved.path == out and saved.bytes == out.stat().st_size and saved.data_path is None
    for field in ("ir_version", "opset_import", "metadata_props", "producer_name"):
        assert getattr(result, field) == getattr(proto, field)
    assert result.graph.input == proto.graph.input and result.graph.output == proto.graph.output
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in.onnx", "out.onnx"]
    assert np.array_equal(run(out), EXPECTED)


def test_external_data_go_beside_the_output(external_path: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    saved = model_save.save(model_io.load(external_path).model, folder / "out.onnx")
    assert sorted(p.name for p in folder.iterdir()) == ["out.onnx", "out.onnx.data"]
    (weight,) = onnx.load(folder / "out.onnx", load_external_data=False).graph.initializer
    assert {e.key: e.value for e in weight.external_data}["location"] == "out.onnx.data"
    assert saved.data_bytes == 4096
    os.rename(external_path.parent / "in.onnx.data", tmp_path / "gone")
    assert np.array_equal(run(folder / "out.onnx"), EXPECTED)


def test_output_over_the_input(external_path: Path) -> None:
    """The weights are read lazily from the very file that the new ones would go to: both stay right."""
    loaded = model_io.load(external_path)
    before = (external_path.parent / "in.onnx.data").read_bytes()
    saved = model_save.save(loaded.model, external_path)
    assert saved.data_path == external_path.parent / "in.onnx.1.data"
    assert "kept" in saved.warnings[0]
    assert (external_path.parent / "in.onnx.data").read_bytes() == before
    assert np.array_equal(run(external_path), EXPECTED)
    assert np.array_equal(next(external_data.external_tensors(loaded.model)).numpy(), np.arange(1024, dtype=np.float32))


def test_saving_again_replaces_its_own_data(external_path: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.onnx"
    for _ in range(3):
        saved = model_save.save(model_io.load(external_path).model, out)
        assert saved.data_path == tmp_path / "out.onnx.data" and saved.warnings == ()
    assert len(list(tmp_path.iterdir())) == 4
    assert np.array_equal(run(out), EXPECTED)


def test_two_runs_do_not_mix_a_model_with_the_others_weights(external_path: Path, tmp_path: Path) -> None:
    """Each moves its two files into place while no other does."""
    out = tmp_path / "out.onnx"
    other = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    thread = threading.Thread(target=model_save.save, args=(model_io.load(external_path).model, out), daemon=True)
    thread.start()
    thread.join(1)
    assert thread.is_alive() and not out.exists() and not (tmp_path / "out.onnx.data").exists()
    os.close(other)
    thread.join(30)
    assert np.array_equal(run(out), EXPECTED)


def test_data_of_other_models_are_kept(external_path: Path, tmp_path: Path) -> None:
    other = tmp_path / "out.onnx.data"
    other.write_bytes(b"precious")
    saved = model_save.save(model_io.load(external_path).model, tmp_path / "out.onnx")
    assert other.read_bytes() == b"precious" and saved.data_path == tmp_path / "out.onnx.1.data"


def test_large_models_become_external(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_save, "INLINE_LIMIT", 4000)
    saved = model_save.save(model_io.load(path).model, tmp_path / "out.onnx")
    assert saved.data_path and saved.data_bytes == 4096
    assert np.array_equal(run(tmp_path / "out.onnx"), EXPECTED)


@pytest.mark.parametrize("existing", [False, True])
@pytest.mark.parametrize("step", ["data", "check", "model"])
def test_failure_leaves_nothing(
    external_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, existing: bool, step: str
) -> None:
    """Interrupted while writing, while checking or between the renames: what was there before is there after."""
    out = tmp_path / "out" / "out.onnx"
    out.parent.mkdir()
    loaded = model_io.load(external_path)
    if existing:
        model_save.save(loaded.model, out)
    before = {p.name: p.read_bytes() for p in out.parent.iterdir()}

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    if step == "data":
        monkeypatch.setattr(ir.ExternalTensor, "tofile", interrupt)
    elif step == "check":
        monkeypatch.setattr(onnx.checker, "check_model", interrupt)
    else:
        replace = os.replace

        def replace_all_but_the_model(source: Path, target: Path) -> None:
            if Path(target) == out:
                raise KeyboardInterrupt
            replace(source, target)

        monkeypatch.setattr(os, "replace", replace_all_but_the_model)
    with pytest.raises(KeyboardInterrupt):
        model_save.save(loaded.model, out)
    assert {p.name: p.read_bytes() for p in out.parent.iterdir()} == before


def test_full_disk_is_a_clear_error(external_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ir.ExternalTensor, "tofile", full)
    with pytest.raises(OutputError, match=r"was not written: .*No space left"):
        model_save.save(model_io.load(external_path).model, tmp_path / "out.onnx")
    assert not (tmp_path / "out.onnx").exists()


def test_invalid_result_is_not_written(path: Path, tmp_path: Path) -> None:
    loaded = model_io.load(path)
    loaded.model.graph.node(0).op_type = "NoSuchOp"
    with pytest.raises(OutputError, match="not valid ONNX and was not written"):
        model_save.save(loaded.model, tmp_path / "out.onnx", source=path)
    assert not (tmp_path / "out.onnx").exists()


def test_invalid_before_is_a_warning_after(tmp_path: Path) -> None:
    """ORT's optimiser writes ops into the default domain that onnx does not know; such models are still served."""
    proto = small_model()
    proto.graph.node[0].op_type = "NoSuchOp"
    source = tmp_path / "in.onnx"
    source.write_bytes(proto.SerializeToString())
    saved = model_save.save(model_io.load(source).model, tmp_path / "out.onnx", source=source)
    assert "does not pass onnx.checker, nor does in.onnx" in saved.warnings[0]


def test_bad_targets(path: Path, tmp_path: Path) -> None:
    model = model_io.load(path).model
    with pytest.raises(OutputError, match="is a directory"):
        model_save.save(model, tmp_path)
    with pytest.raises(OutputError, match="there is no folder"):
        model_save.save(model, tmp_path / "absent" / "out.onnx")
    with pytest.raises(OutputError, match="not a regular file"):
        model_save.save(model, os.devnull)
    with pytest.raises(OutputError, match="binary form"):
        model_save.save(model, tmp_path / "out.json")


def test_constants_with_external_data_come_inside(external_path: Path, tmp_path: Path) -> None:
    proto = onnx.load(external_path, load_external_data=False)
    weight = proto.graph.initializer.pop()
    node = onnx.helper.make_node("Constant", [], ["w"], value=weight)
    proto.graph.node.insert(0, node)
    external_path.write_bytes(proto.SerializeToString())
    loaded = model_io.load(external_path)
    kept = next(external_data.external_tensors(loaded.model))
    model_save.save(loaded.model.clone(), tmp_path / "out.onnx")
    assert next(external_data.external_tensors(loaded.model)) is kept
    assert np.array_equal(run(tmp_path / "out.onnx"), EXPECTED)


@pytest.mark.parametrize("early", [False, True])
def test_small_weights_make_no_data_file(tmp_path: Path, early: bool) -> None:
    """External weights that are all small go into the output itself: no empty file is written beside it."""
    proto = small_model(elements=64)
    source, out = tmp_path / "in.onnx", tmp_path / "out.onnx"
    onnx.save(proto, source, save_as_external_data=True, location="in.data", size_threshold=0)
    saved = model_save.save(model_io.load(source).model if early else ir.load(source), out)
    assert saved.data_path is None and saved.data_bytes == 0 and saved.warnings == ()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in.data", "in.onnx", "out.onnx"]
    (tmp_path / "in.data").unlink()
    session = ort.InferenceSession(str(out), providers=["CPUExecutionProvider"])
    (result,) = session.run(None, {"x": np.ones((2, 64), np.float32)})
    assert np.array_equal(result[1], 1 + np.arange(64, dtype=np.float32))


def test_data_that_were_read_early_are_kept(external_path: Path, tmp_path: Path) -> None:
    """In place: the file of the small tensors is the source's, even if the new model reads nothing from it."""
    proto = onnx.load(external_path, load_external_data=False)
    os.rename(tmp_path / "in.onnx.data", tmp_path / "weights")
    proto.graph.initializer[0].external_data[0].value = "weights"
    shape = proto.graph.initializer.add(name="n", dims=[1], data_type=onnx.TensorProto.INT64)
    shape.data_location = onnx.TensorProto.EXTERNAL
    shape.external_data.add(key="location", value="in.onnx.data")
    (tmp_path / "in.onnx.data").write_bytes(np.array([5]).tobytes())
    external_path.write_bytes(proto.SerializeToString())
    loaded = model_io.load(external_path)
    saved = model_save.save(loaded.model, external_path, source=loaded.path, keep=loaded.data_files)
    assert saved.data_path == tmp_path / "in.onnx.1.data"
    assert (tmp_path / "in.onnx.data").read_bytes() == np.array([5]).tobytes()


BIG = 3 * (683 << 20)  # a little over 2 GiB


@pytest.fixture
def big_path(tmp_path: Path) -> Path:
    """A model with over 2 GiB of weights in a file that takes no space on the disk (a hole with a few bytes in it)."""
    proto = small_model()
    weight = proto.graph.initializer[0]
    for field in ("raw_data", "data_type", "dims"):
        weight.ClearField(field)
    names = []
    rows = BIG // 4 // 3 // 1024
    for i in range(3):
        tensor = weight if i == 0 else proto.graph.initializer.add()
        tensor.name = "w" if i == 0 else f"w{i}"
        tensor.data_type = onnx.TensorProto.FLOAT
        tensor.dims.extend([rows, 1024])
        tensor.data_location = onnx.TensorProto.EXTERNAL
        length = rows * 4096
        for key, value in (("location", "big.data"), ("offset", i * length), ("length", length)):
            tensor.external_data.add(key=key, value=str(value))
        names.append(tensor.name)
    proto.graph.node[0].op_type = "Sum"
    proto.graph.node[0].input[:] = ["x", *names]
    (tmp_path / "big.onnx").write_bytes(proto.SerializeToString())
    with (tmp_path / "big.data").open("wb") as file:
        file.truncate(BIG)
        file.seek(BIG - 4096)
        file.write(np.full(1024, 7, np.float32).tobytes())
    return tmp_path / "big.onnx"


PROGRAM = """
import resource, sys
from deltafuse import external_data, model_io, model_save
loaded = model_io.load(sys.argv[1])
start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
model_save.save(loaded.model, sys.argv[2], source=loaded.path)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - start)
"""


def test_over_two_gib_is_streamed(big_path: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.onnx"
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(big_path), str(out)], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < 200_000, "KiB of memory beyond what loading took"
    data = tmp_path / "out.onnx.data"
    assert data.stat().st_size == BIG
    with data.open("rb") as file:
        file.seek(BIG - 4)
        assert np.frombuffer(file.read(4), np.float32)[0] == 7
    assert len(list(external_data.external_tensors(model_io.load(out).model))) == 3
    data.unlink()
