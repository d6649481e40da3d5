"""Models and runtimes of other versions: the op's version, metadata of another deltafuse, an older ONNX Runtime."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import deltafuse
import onnx
import onnxruntime as ort
import pytest
from deltafuse.custom_ops.kda.reference import reference, relative_error, tolerance
from deltafuse.custom_ops.kda.spec import DOMAIN, VERSION
from deltafuse.errors import DeltaFuseError
from onnx import TensorProto, helper

from .call import SMALL, call_model, draw, quiet, run

INPUTS = draw(SMALL, 2, 5)
#: What the library says it is: a checkout between two releases is 0.2.0.dev7+g0123abc, and its library 0.2.0.
RELEASE = re.split(r"\.(?=\D)", deltafuse.__version__)[0]


def fused_by(*, version: str = "", op_version: int = VERSION) -> bytes:
    """A model of one call, as a deltafuse of this version with this version of the op would have written it."""
    model = call_model(SMALL, INPUTS)
    for imports in (model.opset_import, *(function.opset_import for function in model.functions)):
        for opset in imports:
            if opset.domain == DOMAIN:
                opset.version = op_version
    if version:
        helper.set_model_props(model, {"deltafuse.version": version, "deltafuse.fused": "kda=1"})
    return model.SerializeToString()


def assert_right(made: ort.InferenceSession, kind: str) -> None:
    got, want = run(made, SMALL, INPUTS), reference(SMALL, INPUTS)
    assert all(relative_error(got[name], want[name]) <= tolerance(kind, "float32") for name in want)


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("op_version", [VERSION + 1, VERSION + 40])
def test_newer_op_runs_by_its_body(op_version: int) -> None:
    """Whatever a later version means by its inputs, its body says it: the kernel of this version must stay away."""
    model = fused_by(version="9.0.0", op_version=op_version)
    made = deltafuse.session(model, device="cpu", sess_options=quiet())
    found = deltafuse.assignment(made)
    assert not found.fused
    assert len(found.refused) == 1, found
    says = found.refused[0].reason
    assert f"KimiDeltaAttention version {op_version}, deltafuse {RELEASE} has kernels" in says
    assert f"has kernels for version {VERSION}" in says and "fuse the original model again" in says
    assert f"fused by deltafuse 9.0.0, this is {deltafuse.__version__}" in found.note
    assert_right(made, "body")
    with pytest.raises(DeltaFuseError, match=f"version {op_version}"):
        deltafuse.session(model, device="cpu", sess_options=quiet(), strict=True)


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("version", ["0.0.1", "9.0.0", deltafuse.__version__, "not a version"])
def test_another_deltafuse_with_the_same_op(version: str) -> None:
    """The op's version decides, not the package's."""
    made = deltafuse.session(fused_by(version=version), device="cpu", sess_options=quiet(), strict=True)
    found = deltafuse.assignment(made)
    assert [node.op_type for node in found.fused] == ["KimiDeltaAttention"] and found.note == ""
    assert_right(made, "cpu")


@pytest.mark.usefixtures("library")
def test_a_call_without_its_function_is_an_error_of_the_model() -> None:
    """The plugin does not make a model loadable that onnxruntime alone would not load."""
    model = onnx.load_from_string(fused_by())
    del model.functions[:]
    with pytest.raises(Exception, match="KimiDeltaAttention"):
        deltafuse.session(model.SerializeToString(), device="cpu", sess_options=quiet())


@pytest.mark.usefixtures("library")
def test_two_versions_of_one_op_in_a_model_are_not_mixed_up() -> None:
    """A function of another version beside a call of ours, as a model merged of two fused ones would have it."""
    model = onnx.load_from_string(fused_by())
    later = helper.make_function(
        DOMAIN, "LaterOp", ["x"], ["y"], [helper.make_node("Neg", ["x"], ["y"])], [helper.make_opsetid("", 20)]
    )
    model.functions.append(later)
    model.graph.node.append(helper.make_node("LaterOp", ["beta"], ["z"], name="later", domain=DOMAIN))
    model.graph.output.append(helper.make_tensor_value_info("z", TensorProto.FLOAT, None))
    made = deltafuse.session(model.SerializeToString(), device="cpu", sess_options=quiet())
    found = deltafuse.assignment(made)
    assert [node.name for node in found.fused] == ["kda"]
    assert [node.name for node in found.refused] == ["later"]
    assert_right(made, "cpu")


def test_onnxruntime_1_26_is_refused_with_its_version() -> None:
    """With the wheel itself, where .ci/matrix has put one; a stand-in is in test_ep_session and test_ep_library."""
    folder = os.environ.get("DELTAFUSE_OLD_ORT")
    if not folder:
        pytest.skip("DELTAFUSE_OLD_ORT names no folder with an onnxruntime older than 1.27: .ci/matrix sets it")
    paths = os.pathsep.join([folder, os.environ.get("PYTHONPATH", ""), str(Path(__file__).parents[1])])

    def python(code: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    said = python("import deltafuse\ntry: deltafuse.register()\nexcept deltafuse.DeltaFuseError as e: print(e)")
    assert "onnxruntime 1.26" in said and "is too old: deltafuse needs 1.27 or newer" in said
    # Past the check in Python, the library itself says so to onnxruntime.
    said = python(
        "import onnxruntime as ort, deltafuse\n"
        "try: ort.register_execution_provider_library('deltafuse', deltafuse.get_library_path())\n"
        "except Exception as e: print(e)"
    )
    assert "deltafuse needs ONNX Runtime 1.27 or newer, this is 1.26" in said
