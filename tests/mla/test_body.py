"""The portable body in stock ONNX Runtime against the float64 reference."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from deltafuse.custom_ops.mla import body as body_module
from deltafuse.custom_ops.mla.body import absorbed_up_to, build_function, overload_name
from deltafuse.custom_ops.mla.call import make_node
from deltafuse.custom_ops.mla.draw import CASES, TABLE_ROWS, draw_inputs
from deltafuse.custom_ops.mla.reference import errors, tolerance
from deltafuse.custom_ops.mla.spec import ATTRIBUTES, INPUTS, MlaConfig
from deltafuse.registry.targets import parse_version
from hypothesis import given, settings
from hypothesis import strategies as st
from onnxruntime.capi.onnxruntime_pybind11_state import Fail, InvalidArgument, RuntimeException

from .configs import CONFIGS, FULL
from .onnx_call import TYPES, Arrays, call_model, feeds, run, session
from .strategies import Drawn, calls

LENGTHS = (1, 2, 7, 40)


def assert_close(config: MlaConfig, inputs: Arrays, got: Arrays, allowed: float, what: object) -> None:
    found = errors(config, inputs, got)
    assert max(found.values()) <= allowed, f"{what}: {found}, allowed {allowed}"


@pytest.mark.parametrize("name", CONFIGS)
def test_every_case_and_length(name: str) -> None:
    config = CONFIGS[name]
    running = None
    for case in CASES:
        for tokens in LENGTHS if name != "heads-128" else (1, 9):
            inputs = draw_inputs(config, 3, tokens, 45, np.random.default_rng(tokens), case)
            running = running or session(call_model(config, inputs))
            allowed = tolerance("body", "float32", case, config.cache_type)
            assert_close(config, inputs, run(running, config, inputs), allowed, (case, tokens))


@settings(max_examples=48, deadline=None, derandomize=True)
@given(call=calls(tokens=30), opset=st.sampled_from([19, 21, 23]), known=st.booleans())
def test_anything(call: Drawn, opset: int, known: bool) -> None:
    config, inputs = call.config, call.inputs()
    model = call_model(config, inputs, opset, call.dtype, seq_len=call.tokens if known else None)
    got = run(session(model), config, inputs)
    allowed = tolerance("body", call.dtype, call.case, config.cache_type)
    assert_close(config, inputs, got, allowed, call)


@pytest.mark.parametrize("known", [False, True])
def test_no_tokens_and_no_sequences(known: bool) -> None:
    """Nothing comes out; caches stay as they were. ONNX Runtime before 1.32 multiplies no matrices of no sequences."""
    for name in ("no-cache", "full", "expanded", "static"):
        config = CONFIGS[name]
        inputs = draw_inputs(config, 2, 3, 20, np.random.default_rng(0))
        running = session(call_model(config, inputs, seq_len=3 if known else None))
        if parse_version(ort.__version__) >= (1, 32):
            nobody = {n: a[:0] if a.shape[:1] == (2,) else a for n, a in inputs.items()}
            assert run(running, config, nobody)["o"].shape == (0, 3, config.num_heads * config.v_head_dim), name
        if not known:
            inputs = draw_inputs(config, 2, 0, 20, np.random.default_rng(0))
            got = run(running, config, inputs)
            assert got["o"].shape == (2, 0, config.num_heads * config.v_head_dim), name
            assert_close(config, inputs, got, tolerance("body", "float32"), name)


def test_nan_is_not_taken_for_a_query_without_keys() -> None:
    config = CONFIGS["no-cache"]
    config = replace(config, has_mask=True, bool_mask=False)
    inputs = draw_inputs(config, 2, 5, 0, np.random.default_rng(3))
    inputs["q"][1, 2] = np.nan
    got = run(session(call_model(config, inputs)), config, inputs)["o"]
    assert np.isnan(got[1, 2]).all() and np.isfinite(np.delete(got[1], 2, 0)).all()


@pytest.mark.parametrize("opset", [18, 19, 20, 21, 23, 24, 26])
@pytest.mark.parametrize("dtype", TYPES)
def test_opsets_and_types(opset: int, dtype: str) -> None:
    names = (
        "full",
        "no-cache",
        "static",
        "paged",
        "expanded",
        "expanded-static",
        "int8-paged",
        "float8",
        "float8-paged",
    )
    for name in names:
        config = CONFIGS[name]
        if config.cache_type == "float8" and opset < 19:
            with pytest.raises(ValueError, match="needs opset 19"):
                build_function(config, opset)
            continue
        cos_dtype = dtype if name in ("full", "static") else "float32"
        inputs = draw_inputs(
            config, 2, 5, 30, np.random.default_rng(1), dtype=dtype, cos_dtype=cos_dtype, lengths_dtype="int64"
        )
        model = call_model(config, inputs, opset, dtype)
        onnx.checker.check_model(model, full_check=True)
        got = run(session(model), config, inputs)
        assert_close(config, inputs, got, tolerance("body", dtype, cache_type=config.cache_type), name)


@pytest.mark.parametrize("level", [0, 99])
@pytest.mark.parametrize("name", CONFIGS)
def test_known_length_and_constant_weight(name: str, level: int) -> None:
    """The form is chosen when the body is built, and both forms give the same."""
    config = CONFIGS[name]
    most = absorbed_up_to(config)
    for seq_len in (1, 3, 25):
        inputs = draw_inputs(config, 2, seq_len, 30, np.random.default_rng(2), shared=True)
        model = call_model(config, inputs, seq_len=seq_len, dynamic=seq_len == 3, constant_weight=True)
        assert not {"If", "Loop"} & {node.op_type for node in model.functions[0].node}
        got = run(session(model, level), config, inputs)
        assert_close(config, inputs, got, tolerance("body", "float32", cache_type=config.cache_type), seq_len)
    general = build_function(config, 20)
    assert ("If" in {node.op_type for node in general}) == (most is not None)


@pytest.mark.parametrize("seq_len", [None, 11])
@pytest.mark.parametrize("name", CONFIGS)
def test_queries_in_parts(name: str, seq_len: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long prompts go a few queries after the other."""
    monkeypatch.setattr(body_module, "QUERIES", 4)
    monkeypatch.setattr(body_module, "absorbed_up_to", lambda config: 2 if config.cache != "expanded" else 0)
    config = CONFIGS[name]
    for shared in (False, True):
        inputs = draw_inputs(config, 2, 11, 30, np.random.default_rng(7), shared=shared)
        if config.has_mask and shared:
            inputs["attn_mask"] = inputs["attn_mask"][:, :, -1:]  # one row for all queries
        model = call_model(config, inputs, seq_len=seq_len)
        got = run(session(model), config, inputs)
        assert_close(config, inputs, got, tolerance("body", "float32", cache_type=config.cache_type), (name, shared))


def test_which_form() -> None:
    deepseek = CONFIGS["heads-128"]
    assert absorbed_up_to(deepseek) == 512 * 256 // 768
    assert absorbed_up_to(replace(deepseek, cache="expanded")) == 0
    assert absorbed_up_to(replace(deepseek, kv_lora_rank=96)) is None
    kinds = {
        overload_name(deepseek, TYPES["float16"], seq_len=n).rsplit("-", 1)[1] for n in (None, 1, 2, 170, 171, 513)
    }
    assert kinds == {"f16", "t1", "few", "many", "long"}


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("name", CONFIGS)
def test_frozen_shapes_with_the_general_body(name: str, tokens: int) -> None:
    """Both branches stay well typed where the model knows every size, and no runtime folds more than it can."""
    config = CONFIGS[name]
    inputs = draw_inputs(config, 2, tokens, 40, np.random.default_rng(3))
    model = call_model(config, inputs, dynamic=False)
    onnx.checker.check_model(model, full_check=True)
    got = run(session(model), config, inputs)
    assert_close(config, inputs, got, tolerance("body", "float32", cache_type=config.cache_type), name)


def in_a_branch(model: onnx.ModelProto) -> onnx.ModelProto:
    """The whole graph as the branch that a constant chooses."""
    graph, helper = model.graph, onnx.helper
    chosen, other = onnx.GraphProto(name="chosen"), onnx.GraphProto(name="other")
    chosen.node.extend(graph.node)
    chosen.output.extend(graph.output)
    outside = []
    for output in graph.output:
        kind = output.type.tensor_type.elem_type
        empty = helper.make_tensor("", kind, [0], [])
        other.node.append(helper.make_node("Constant", [], [f"{output.name}_other"], value=empty))
        other.output.append(helper.make_tensor_value_info(f"{output.name}_other", kind, [0]))
        outside.append(helper.make_tensor_value_info(f"{output.name}_chosen", kind, None))
    del graph.node[:], graph.output[:]
    graph.initializer.append(helper.make_tensor("always", onnx.TensorProto.BOOL, [], [True]))
    names = [output.name for output in outside]
    graph.node.append(helper.make_node("If", ["always"], names, then_branch=chosen, else_branch=other))
    graph.output.extend(outside)
    return model


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", ["full", "expanded", "heads-128", "int8"])
def test_inside_a_branch_that_is_folded(name: str, dynamic: bool) -> None:
    """ONNX Runtime inlines the branch, and must not lose what the body's own branches capture."""
    config = CONFIGS[name]
    for tokens in (5, 520):
        inputs = draw_inputs(config, 1, tokens, 9, np.random.default_rng(8))
        running = session(in_a_branch(call_model(config, inputs, dynamic=dynamic)))
        names = [value.name for value in running.get_inputs()]
        results = running.run(None, {name: x for name, x in feeds(inputs).items() if name in names})
        got = dict(zip(config.output_names(), results, strict=True))
        assert_close(config, inputs, got, tolerance("body", "float32", cache_type=config.cache_type), (name, tokens))


@pytest.mark.parametrize("name", ["full", "expanded", "packed-cache", "int8"])
def test_an_empty_past(name: str) -> None:
    config = CONFIGS[name]
    for tokens in (1, 4):
        inputs = draw_inputs(config, 2, tokens, 0, np.random.default_rng(4))
        got = run(session(call_model(config, inputs)), config, inputs)
        assert_close(config, inputs, got, tolerance("body", "float32", cache_type=config.cache_type), name)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("full", {"position_ids": np.full((2, 3), TABLE_ROWS)}),
        ("full", {"position_ids": np.full((2, 3), -1)}),
        ("static", {"cache_lengths": np.array([0, 18], np.int32)}),
        ("static", {"cache_lengths": np.array([-1, 0], np.int32)}),
        ("expanded-static", {"cache_lengths": np.array([18, 0], np.int32)}),
        ("paged", {"cache_lengths": np.array([0, 99], np.int32)}),
        ("paged", {"block_table": np.full((2, 2), 77, np.int32)}),
        ("paged", {"block_table": np.full((2, 2), -1, np.int32)}),
        ("full", {"attn_mask": np.zeros((2, 3, 3, 22), np.float32)}),
        ("static", {"attn_mask": np.zeros((2, 3, 3, 23), np.float32)}),
    ],
)
def test_bad_values_are_errors_not_results(name: str, change: Arrays) -> None:
    config = CONFIGS[name]
    inputs = draw_inputs(config, 2, 3, 20, np.random.default_rng(5))
    running = session(call_model(config, inputs))
    run(running, config, inputs)
    with pytest.raises((Fail, InvalidArgument, RuntimeException)):
        run(running, config, {**inputs, **change})


def test_signature_is_the_spec() -> None:
    function = build_function(FULL, 20)
    assert [value.name for value in function.inputs] == list(INPUTS)
    assert set(ATTRIBUTES) == set(function.attributes)
    assert all(node.domain == "" for node in ir.traversal.RecursiveGraphIterator(function.graph))


def test_shapes_and_types_of_the_node() -> None:
    for name, shapes in (
        ("full", [(2, 3, 18), (2, 10, 10), (2, 10, 4)]),
        ("static", [(2, 3, 18), (2, 7, 10), (2, 7, 4)]),
        ("fresh-expanded", [(2, 3, 18), (), (), (), (2, 3, 3, 9), (2, 3, 3, 6)]),
        ("float8", [(2, 3, 18), (2, 10, 130), (2, 10, 4), (2, 10, 2)]),
    ):
        config = CONFIGS[name]
        inputs = draw_inputs(config, 2, 3, 7, np.random.default_rng(6))
        values = {name: ir.Value(name=name, shape=ir.Shape(x.shape)) for name, x in inputs.items()}
        node = make_node(config, values, ir.DataType.FLOAT16)
        assert [tuple(y.shape or ()) for y in node.outputs] == shapes
        assert [y.name for y in node.outputs] == [None if shape else "" for shape in shapes]
    assert [y.dtype for y in node.outputs][1:] == [TYPES["float16"].FLOAT8E4M3FN, TYPES["float16"], TYPES["float32"]]


def test_bad_calls_are_refused() -> None:
    with pytest.raises(ValueError, match="opset 17"):
        build_function(FULL, 17)
    with pytest.raises(ValueError, match="dtype"):
        build_function(FULL, 20, ir.DataType.DOUBLE)
    with pytest.raises(ValueError, match="window 2"):
        build_function(replace(FULL, window=2, causal=0), 20)
    with pytest.raises(ValueError, match="expected"):
        make_node(FULL, {})
