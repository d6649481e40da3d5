"""The table of ONNX Runtime's releases, against the release that is here; .ci/matrix runs this on each of them."""

from __future__ import annotations

from dataclasses import replace

import deltafuse
import onnxruntime as ort
import pytest
from deltafuse.custom_ops.kda.reference import reference, relative_error, tolerance
from deltafuse.registry.runtimes import RUNTIMES, lacks, model_refusal, runtime
from deltafuse.registry.targets import ORT_OPS, parse_version
from onnx import TensorProto, helper

from .call import SMALL, call_model, draw, quiet

HERE = runtime(ort.__version__)
needs_entry = pytest.mark.skipif(HERE is None, reason=f"the table does not know onnxruntime {ort.__version__}")


def problem(opset: int = 20, ir_version: int = 10, op: str = "Neg", domain: str = "") -> str:
    """What onnxruntime says of a model of one node; "" where it loads."""
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in "xy")
    graph = helper.make_graph([helper.make_node(op, ["x"], ["y"], domain=domain)], "g", [x], [y])
    imports = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=ir_version)
    try:
        ort.InferenceSession(model.SerializeToString(), quiet(), providers=["CPUExecutionProvider"])
    except Exception as error:
        return str(error)
    return ""


@needs_entry
def test_opsets_and_ir_versions() -> None:
    assert HERE is not None
    assert problem(opset=HERE.max_opset) == "" and problem(ir_version=HERE.max_ir_version) == ""
    assert problem(opset=HERE.max_opset + 1) and problem(ir_version=HERE.max_ir_version + 1)


@pytest.mark.parametrize("op", ORT_OPS)
def test_ops_of_com_microsoft(op: str) -> None:
    registered = "is not a registered function/op" not in problem(op=op, domain="com.microsoft")
    assert registered == (parse_version(ort.__version__) >= ORT_OPS[op])


def test_refusals_say_what_is_needed() -> None:
    said = model_refusal(27, 10, "1.31.1")
    assert said is not None
    assert said.reason == "the model has opset 27: onnxruntime 1.31.1 loads up to 26; it needs 1.32 or newer"
    said = model_refusal(99, 10, "1.32.0")
    assert said is not None and "a newer release than is known here" in said.reason
    said = model_refusal(20, 14, "1.27.0")
    assert said is not None and "IR version 14" in said.reason
    assert model_refusal(26, 13, "1.27.0") is model_refusal(28, 14, "1.32.0") is model_refusal(99, 99, "9.9") is None


def test_lacks() -> None:
    assert [found.version for found in RUNTIMES] == [(1, minor) for minor in range(27, 33)]
    assert lacks("1.32.0") == [] == lacks("2.0")
    assert any("opset 26" in line for line in lacks("1.31.1"))
    assert any("GatedDeltaNet" in line for line in lacks("1.29.0"))
    assert not any("GatedDeltaNet" in line for line in lacks("1.30.0"))


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("plugin", [True, False])
def test_overloads_of_one_function(plugin: bool) -> None:
    """Two calls of different geometry in a model: each runs its own function, on the plugin and without it."""
    other = replace(SMALL, head_dim=16, head_v_dim=8)
    calls = {"a_": (SMALL, draw(SMALL, 2, 3)), "b_": (other, draw(other, 2, 3, seed=1))}
    models = []
    for prefix, (config, inputs) in calls.items():
        model = call_model(config, inputs)
        for node in model.graph.node:
            node.name = prefix + node.name
            node.input[:] = [prefix + name if name else "" for name in node.input]
            node.output[:] = [prefix + name if name else "" for name in node.output]
        for value in (*model.graph.input, *model.graph.output):
            value.name = prefix + value.name
        models.append(model)
    one, two = (model.graph for model in models)
    assert models[0].functions[0].overload != models[1].functions[0].overload
    graph = helper.make_graph([*one.node, *two.node], "two", [*one.input, *two.input], [*one.output, *two.output])
    functions = [*models[0].functions, *models[1].functions]
    both = helper.make_model(graph, opset_imports=models[0].opset_import, functions=functions, ir_version=10)
    written = both.SerializeToString()
    if plugin:
        made = deltafuse.session(written, device="cpu", sess_options=quiet(), strict=True)
    else:
        made = ort.InferenceSession(written, quiet(), providers=["CPUExecutionProvider"])
    feeds = {prefix + name: x for prefix, (_, inputs) in calls.items() for name, x in inputs.items()}
    for prefix, (config, inputs) in calls.items():
        want = reference(config, inputs)
        got = made.run([prefix + name for name in want], feeds)
        allowed = tolerance("cpu" if plugin else "body", "float32")
        assert all(relative_error(x, want[name]) <= allowed for x, name in zip(got, want, strict=True))


def test_fusing_says_that_a_model_is_too_new(monkeypatch: pytest.MonkeyPatch) -> None:
    import deltafuse.api

    monkeypatch.setattr(deltafuse.api, "require_ort", lambda purpose: "1.31.1")
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in "xy")
    graph = helper.make_graph([helper.make_node("Neg", ["x"], ["y"])], "g", [x], [y])
    for opset, says in ((27, ["the model has opset 27: onnxruntime 1.31.1 loads up to 26"]), (26, [])):
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
        warnings = deltafuse.inspect(model).warnings
        assert [warning.partition(";")[0] for warning in warnings if "loads up to" in warning] == says
