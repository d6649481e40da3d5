"""`--latent-cache`: another signature, the same model."""

from __future__ import annotations

from pathlib import Path

import deltafuse
import numpy as np
import onnx
import onnx_ir as ir
import pytest
from deltafuse.compare import compare
from deltafuse.errors import OptionError
from deltafuse.fusions.mla.latent_cache import config_of, sequence_error
from deltafuse.fusions.pipeline import fuse_model
from exports import library

Arrays = library.Arrays
TOKENS = 6


def steps(model: onnx.ModelProto, seed: int = 3) -> list[np.ndarray]:
    """The first output of each step, from an empty cache on: outputs after it are the next step's caches."""
    session = library.session(model)
    rng = np.random.default_rng(seed)
    caches = [i for i in model.graph.input if len(library.shape_of(i)) >= 3 and i.name != "x"]
    state: Arrays = {}
    for value in caches:
        shape = [d if isinstance(d, int) else 0 for d in library.shape_of(value)]
        state[value.name] = np.zeros(shape, np.float32)
    found = []
    for at in range(TOKENS):
        feeds: Arrays = {"x": rng.standard_normal((1, 1, 24)).astype(np.float32), **state}
        feeds["positions"] = np.array([[at]])
        if any(i.name == "rest_0" and len(library.shape_of(i)) == 1 for i in model.graph.input):
            feeds["rest_0"] = np.array([at])
        outputs = list(library.run(session, feeds).values())
        found.append(outputs[0])
        state = {value.name: array for value, array in zip(caches, outputs[1:], strict=True)}
    return found


@pytest.mark.parametrize("name", ["mla_expanded", "mla_expanded_op24", "mla_static"])
def test_a_sequence_gives_the_same_with_a_cache_of_latents(name: str) -> None:
    before = library.export(name).proto()
    report = fuse_model(ir.from_proto(before), latent_cache=True)
    assert report.model is not None
    after = ir.to_proto(report.model)
    onnx.checker.check_model(after)
    for one, other in zip(steps(before), steps(after), strict=True):
        assert library.error(other, one) < 1e-4
    note = next(n for p in report.passes if p.name == "latent-cache" for n in p.notes)
    for value in (*after.graph.input, *after.graph.output):
        if value.name not in {v.name for v in (*before.graph.input, *before.graph.output)}:
            assert value.name in note
    sizes = [library.shape_of(i)[-1] for i in after.graph.input if "rest" in i.name]
    assert 16 in sizes and 4 in sizes


def test_verify_runs_both_from_empty_caches(tmp_path: Path) -> None:
    """It compares what both give, step for step, and sees a cache that is written wrongly."""
    before, after = tmp_path / "before.onnx", tmp_path / "after.onnx"
    onnx.save(library.export("mla_expanded").proto(), before)
    deltafuse.fuse(before, after, latent_cache=True)
    found = compare(before, after, tokens=(5,))
    assert found.same
    assert found.own_states == (["rest_0", "rest_1"], ["rest_0.latent", "rest_1.k_rope"])
    assert [check.output for case in found.cases for check in case.outputs] == ["linear_3"]
    assert found.cases[0].tokens == [1] * 9
    with pytest.raises(OptionError, match="'rest_0' is a state of one of the models alone"):
        compare(before, after, given={"rest_0": np.zeros((1, 3, 2, 12), np.float32)})

    wrong = onnx.load(after)
    call = next(node for node in wrong.graph.node if node.op_type == "LatentAttention")
    place = next(i for i, name in enumerate(call.output) if name.endswith(".latent"))
    wrong.graph.node.append(onnx.helper.make_node("Mul", ["wrong", "two"], [call.output[place]]))
    wrong.graph.initializer.append(onnx.numpy_helper.from_array(np.float32(2), "two"))
    call.output[place] = "wrong"
    onnx.save(wrong, after)
    assert not compare(before, after, tokens=(5,)).same


def turned_caches(tmp_path: Path) -> Path:
    """Caches of keys and values with tokens before heads, [B, P, H, .]."""
    path = tmp_path / "turned.onnx"
    onnx.save(library.export("mla_deepseek_cached").proto(), path)
    return path


def test_caches_with_tokens_before_heads(tmp_path: Path) -> None:
    before, after = turned_caches(tmp_path), tmp_path / "after.onnx"
    report = deltafuse.fuse(before, after, latent_cache=True)
    assert report.count("mla") == 1 and not [r for p in report.passes for r in p.refused]
    shapes = {v.name: library.shape_of(v) for v in (*onnx.load(after).graph.input, *onnx.load(after).graph.output)}
    assert shapes["rest_2.latent"] == ["B", "past", 16] and shapes["rest_3.k_rope"] == ["B", "past", 4]
    assert shapes["out_1.latent"][::2] == ["B", 16] and shapes["out_2.k_rope"][::2] == ["B", 4]
    assert not {n.op_type for n in onnx.load(after).graph.node} & {"Transpose"}
    assert compare(before, after, tokens=(1, 7), batch=2).same


@pytest.mark.parametrize("end", ["past", "present"])
def test_turned_caches_that_others_read_stay(tmp_path: Path, end: str) -> None:
    path = turned_caches(tmp_path)
    report = deltafuse.fuse(path)
    assert report.model is not None
    fused = report.to_proto()
    turns = [n for n in fused.graph.node if n.op_type == "Transpose"]
    assert len(turns) == 4
    read = "rest_2" if end == "past" else next(n.input[0] for n in turns if "out_1" in n.output)
    fused.graph.node.append(onnx.helper.make_node("ReduceSum", [read], ["total"], keepdims=0))
    fused.graph.output.append(onnx.helper.make_tensor_value_info("total", onnx.TensorProto.FLOAT, []))
    again = fuse_model(ir.from_proto(fused), latent_cache=True)
    assert [r.code for p in again.passes if p.name == "latent-cache" for r in p.refused] == ["latent-cache"]


def test_a_state_of_one_model_alone_is_another_model(tmp_path: Path) -> None:
    before, other = tmp_path / "before.onnx", tmp_path / "other.onnx"
    model = library.export("mla_expanded").proto()
    onnx.save(model, before)
    model.graph.input.append(onnx.helper.make_tensor_value_info("past.9", onnx.TensorProto.FLOAT, [1, 3, "past", 12]))
    onnx.save(model, other)
    with pytest.raises(OptionError, match=r"only the second has past\.9"):
        compare(before, other)


def test_it_is_asked_for() -> None:
    """Without the option the signature stays."""
    before = library.export("mla_expanded").proto()
    report = fuse_model(ir.from_proto(before))
    assert report.model is not None
    after = ir.to_proto(report.model)
    assert [i.name for i in after.graph.input] == [i.name for i in before.graph.input]


def test_without_such_a_cache_it_says_so() -> None:
    report = fuse_model(library.export("mla_two").model(), latent_cache=True)
    notes = [note for p in report.passes if p.name == "latent-cache" for note in p.notes]
    assert notes == ["no fused latent attention has a cache of keys and values"]


def test_a_cache_that_others_read_stays() -> None:
    """An output that is something else besides a cache can't change its meaning."""
    model = library.export("mla_expanded").model()
    report = fuse_model(model)
    assert report.model is not None
    fused = ir.to_proto(report.model)
    key = next(i.name for i in fused.graph.input if library.shape_of(i)[-1] == 12)
    fused.graph.node.append(onnx.helper.make_node("ReduceSum", [key], ["total"], keepdims=0))
    fused.graph.output.append(onnx.helper.make_tensor_value_info("total", onnx.TensorProto.FLOAT, []))
    again = fuse_model(ir.from_proto(fused), latent_cache=True)
    refused = [r for p in again.passes if p.name == "latent-cache" for r in p.refused]
    assert [r.code for r in refused] == ["latent-cache"]


def test_the_check_compares_both_forms() -> None:
    """It is small for right bodies."""
    report = fuse_model(library.export("mla_expanded").model())
    assert report.model is not None
    node = next(n for n in report.model.graph if n.op_type == "LatentAttention")
    assert sequence_error(config_of(node)) < 1e-5
