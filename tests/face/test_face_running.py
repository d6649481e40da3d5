"""``session`` and ``capture``: the models that they take, and clear errors for all else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import deltafuse
import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from deltafuse.capture_states import pair_states
from deltafuse.errors import (
    DeltaFuseError,
    ModelFileError,
    ModelKindError,
    NotOnnxError,
    OptionError,
    OrtError,
    TruncatedModelError,
)
from onnx import parser


def quiet() -> ort.SessionOptions:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    return options


#: A state of two sizes that are open, as an input of the step's own batch.
STEPS = """
<ir_version: 8, opset_import: ["" : 20]>
g (float[B, T, 2] x, float[B, 1, 2] s, float[M, 2] m) => (float[B, T, 2] y, float[B, 1, 2] new_s)
<int64[1] axis = {1}> {
  total = ReduceSum <keepdims=1> (x, axis)
  new_s = Add (s, total)
  xs = Add (x, s)
  y = Add (xs, m)
}
"""


def steps(**how: Any) -> Any:
    return deltafuse.capture(parser.parse_model(STEPS), device="cpu", states={"s": "new_s"}, **how)


M = np.zeros((1, 2), np.float32)


def ones(*shape: int) -> np.ndarray:
    return np.ones(shape, np.float32)


def test_each_kind_of_model(path: Path, proto: onnx.ModelProto) -> None:
    x = ones(2, 1024)
    data = proto.SerializeToString()
    for model in (path, str(path), data, bytearray(data), proto, ir.from_proto(proto), deltafuse.fuse(proto).model):
        session = deltafuse.session(model, device="cpu")
        (want,) = session.run(None, {"x": x})
        with deltafuse.capture(model, device="cpu") as runner:
            np.testing.assert_array_equal(runner(x=x)["y"], want)
    assert proto.SerializeToString() == data


def test_external_data_of_a_model_in_memory(external_path: Path) -> None:
    with pytest.raises(ModelKindError, match="the model has external data: save it"):
        deltafuse.session(ir.load(external_path))


@pytest.mark.parametrize("make", [deltafuse.session, deltafuse.capture])
def test_what_is_no_model(make: Any, path: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    truncated, empty, random = tmp_path / "short.onnx", tmp_path / "empty.onnx", tmp_path / "random.onnx"
    truncated.write_bytes(path.read_bytes()[:-100])
    empty.write_bytes(b"")
    random.write_bytes(os.urandom(500))
    bad: list[tuple[Any, type[DeltaFuseError], str]] = [
        (tmp_path / "nope.onnx", ModelFileError, r"nope\.onnx: no such file"),
        (tmp_path, ModelFileError, "is a directory"),
        (tmp_path / ("n" * 300), ModelFileError, "File name too long"),
        (truncated, TruncatedModelError, "is truncated"),
        (empty, NotOnnxError, "is empty"),
        (random, NotOnnxError, "is not an ONNX model"),
        (b"\xff\xff", NotOnnxError, "the model is not an ONNX model, or is damaged"),
        (onnx.ModelProto(), OrtError, "does not take the model"),
        (None, ModelKindError, r"expected a path, the bytes of a model, an onnx\.ModelProto.* got builtins\.NoneType"),
        (3, ModelKindError, r"got builtins\.int"),
        ({"states": 1}, ModelKindError, r"got builtins\.dict"),
    ]
    for model, kind, message in bad:
        with pytest.raises(kind, match=message):
            make(model, device="cpu", sess_options=quiet())


def test_a_model_that_onnxruntime_refuses(proto: onnx.ModelProto, path: Path) -> None:
    proto.graph.node[0].op_type = "NoSuchOp"
    path.write_bytes(proto.SerializeToString())
    for model, what in ((proto, "the model"), (path, str(path))):
        with pytest.raises(OrtError, match=f"onnxruntime .* does not take {what}: .*NoSuchOp"):
            deltafuse.session(model, device="cpu", sess_options=quiet())


def test_options_of_wrong_types(proto: onnx.ModelProto) -> None:
    for how, message in (
        ({"sess_options": {"a": 1}}, r"expected an onnxruntime\.SessionOptions"),
        ({"provider_options": "fast"}, "provider_options 'fast': expected options by provider name"),
        ({"provider_options": {"CUDAExecutionProvider": 3}}, "expected options by provider name"),
        ({"device": 3}, "device 3: expected 'auto'"),
    ):
        with pytest.raises(OptionError, match=message):
            deltafuse.session(proto, **how)  # type: ignore[arg-type]
    for how, message in (({"warmup": "2"}, "warmup '2'"), ({"cache": 1.5}, "cache 1.5"), ({"states": 7}, "states 7")):
        with pytest.raises(OptionError, match=message):
            deltafuse.capture(proto, **how)  # type: ignore[arg-type]


PROGRAM = """
import sys, deltafuse, onnxruntime as ort
options = None
if len(sys.argv) > 2:
    options = ort.SessionOptions()
    options.log_severity_level = int(sys.argv[2])
deltafuse.session(sys.argv[1], sess_options=options)
"""


def test_sessions_print_nothing_unless_asked(path: Path) -> None:
    for severity, said in (((), False), (("0",), True)):
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, path, *severity], capture_output=True, text=True, check=True
        )
        assert bool(done.stderr) is said and done.stdout == "", done.stderr


def value(name: str, *shape: int | str | None) -> ort.NodeArg:
    class Value:
        type = "tensor(float)"

    made: Any = Value()
    made.name, made.shape = name, list(shape)
    return made


def test_states_whose_shapes_cannot_match() -> None:
    class Io:
        def get_inputs(self) -> list[Any]:
            return [value("x", "B", "T", 16), value("s", "B", 2, 8), value("past_k", 1, 5, 8), value("any")]

        def get_outputs(self) -> list[Any]:
            return [value("y", "B", "T", 4, 4), value("new_s", None, 2, 8), value("present_k", 1, 6, 8)]

    for pairs, message in (
        (
            {"s": "y"},
            r"states: s is of shape \[B, 2, 8\], y of shape \[B, T, 4, 4\]: the one cannot continue the other",
        ),
        ({"s": "new_s", "past_k": "present_k"}, r"past_k is of shape \[1, 5, 8\], present_k of shape \[1, 6, 8\]"),
        ({"x": "new_s"}, r"\[B, T, 16\], new_s of shape \[\?, 2, 8\]"),
    ):
        with pytest.raises(OptionError, match=message):
            pair_states(Io(), pairs)
    assert pair_states(Io(), {"any": "y"}) == {"any": "y"}, "nothing is declared of it"
    assert pair_states(Io(), "auto") == {"s": "new_s"}
    with pytest.raises(OptionError, match="cannot continue"):
        deltafuse.capture(parser.parse_model(STEPS), states={"m": "new_s"})


def test_another_batch_needs_a_reset() -> None:
    runner = steps()
    runner(x=ones(2, 1, 2), m=M)
    for _ in range(2):
        with pytest.raises(OptionError, match=r"x has B 3, the states have 2 \(s\): reset\(\) first"):
            runner(x=ones(3, 1, 2), m=M)
    with pytest.raises(OptionError, match=r"reset\(\) first"):
        runner.prepare({"x": ones(3, 1, 2), "m": M})
    np.testing.assert_array_equal(runner.state_arrays()["s"], ones(2, 1, 2))
    np.testing.assert_array_equal(runner(x=ones(2, 5, 2), m=M)["y"], 2 * ones(2, 5, 2))
    runner.reset()
    np.testing.assert_array_equal(runner(x=ones(3, 1, 2), m=M)["y"], ones(3, 1, 2))


def test_shapes_that_the_model_does_not_take() -> None:
    runner = steps()
    for feeds, message in (
        ({"x": ones(2, 1, 3), "m": M}, r"x is of shape \[2, 1, 3\]: expected \[B, T, 2\]"),
        ({"x": ones(2, 2), "m": M}, r"x is of shape \[2, 2\]: expected \[B, T, 2\]"),
        ({"x": ones(2, 1, 2), "m": ones(2)}, r"m is of shape \[2\]: expected \[M, 2\]"),
    ):
        with pytest.raises(OptionError, match=message):
            runner(**feeds)
    for state in (ones(1, 2, 2, 2), ones(1, 1, 3)):
        with pytest.raises(OptionError, match=r"s is of shape .* expected \[B, 1, 2\]"):
            runner.reset({"s": state})


def test_a_step_that_fails_leaves_no_batch_behind() -> None:
    """The kernel refuses it in the middle: that is a DeltaFuseError, and the next step begins as if it had not been."""
    runner = steps(sess_options=quiet())
    with pytest.raises(DeltaFuseError, match=r"the step \(x 2x5x2, m 3x2, s 2x1x2\) failed: .*Add"):
        runner(x=ones(2, 5, 2), m=np.zeros((3, 2), np.float32))
    np.testing.assert_array_equal(runner(x=ones(4, 1, 2), m=M)["y"], ones(4, 1, 2))
    with pytest.raises(DeltaFuseError, match="failed"):
        runner(x=ones(4, 5, 2), m=np.zeros((3, 2), np.float32))
    np.testing.assert_array_equal(runner.state_arrays()["s"], ones(4, 1, 2))


def test_sizes_that_share_only_a_name_are_not_bound() -> None:
    """Exporters name sizes carelessly: what was not equal at the start need not be later."""
    text = STEPS.replace("float[M, 2] m", "float[B, 2] m")
    runner = deltafuse.capture(parser.parse_model(text), device="cpu", states={"s": "new_s"}, sess_options=quiet())
    for rows in (1, 1, 5):
        assert runner(x=ones(2, 5, 2), m=np.zeros((rows, 2), np.float32))["y"].shape == (2, 5, 2)
