"""Every export of latent attention alone: fused, and right against the export and against PyTorch."""

from __future__ import annotations

import math

import onnx
import onnx_ir as ir
import pytest
from deltafuse.fusions.pipeline import fuse_model
from exports import library

from . import kit

MLA = [n for n in library.names("mla") if library.export(n).mla]
REFUSED = [n for n in library.names("mla") if not library.export(n).mla]
#: What makes an attention: none may be left.
ATTENTION = {"Softmax", "Attention", "IsNaN"}


def configuration(name: str) -> dict[str, object]:
    """The first fused block's attributes, as the report has them."""
    _, report, _ = kit.fused(name)
    return next(r.config for r in report.regions if r.op == "mla")


@pytest.mark.parametrize("name", MLA)
def test_it_is_fused(name: str) -> None:
    """Counts, validity, and the same outputs at every length."""
    export = library.export(name)
    before, report, after = kit.fused(name)
    assert report.count("mla") == export.mla, kit.why(report)
    assert sum(n.op_type == "LatentAttention" and n.domain == "deltafuse" for n in after.graph.node) == export.mla
    assert all(r.proof is not None and r.proof.proved for r in report.regions if r.status == "fused")
    assert not ATTENTION & kit.ops(after.graph)
    assert report.nodes_after < report.nodes_before
    onnx.checker.check_model(after)
    kit.same(before, after, *map(export.feeds, export.bindings), tolerance=export.tolerance)


@pytest.mark.parametrize("name", [n for n in MLA if library.export(n).truth])
def test_it_matches_pytorch(name: str) -> None:
    export = library.export(name)
    _, _, after = kit.fused(name)
    session = library.session(after)
    for case, (inputs, truth) in export.truths().items():
        error, output = library.worst(library.run(session, inputs), truth)
        assert error <= export.tolerance, f"{case}: {output} is off by {error:.1e}"


@pytest.mark.parametrize(
    "name", ["mla_deepseek_v3_prefill", "mla_mistral4_decode", "mla_expanded_op24", "mla_static", "mla_bool_op23"]
)
def test_names_and_metadata_are_not_needed(name: str) -> None:
    before, report, after = kit.fused(name, stripped=True)
    export = library.export(name)
    assert report.count("mla") == export.mla, kit.why(report)
    kit.same(before, after, export.feeds(), tolerance=export.tolerance)


@pytest.mark.parametrize("name", MLA)
def test_the_interface_is_kept(name: str) -> None:
    before, _, after = kit.fused(name)
    for side in ("input", "output"):
        old, new = getattr(before.graph, side), getattr(after.graph, side)
        assert [v.name for v in new] == [v.name for v in old]
        for a, b in zip(old, new, strict=True):
            assert b.type.tensor_type.elem_type == a.type.tensor_type.elem_type, a.name
            assert library.shape_of(b) == library.shape_of(a), a.name


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_shown_to_be_right_is_refused_with_its_reason(name: str) -> None:
    before, report, after = kit.fused(name)
    refused = [r for r in report.regions if r.op == "mla"]
    assert refused and all(r.status == "refused" and r.refusal is not None for r in refused)
    kit.same(before, after, library.export(name).feeds({"S": 4}), tolerance=1e-6)


@pytest.mark.parametrize("name", ["mla_half", "mla_absorbed", "mla_packed", "mla_mistral4_prefill"])
def test_portable_target_uses_standard_ops_only(name: str) -> None:
    export = library.export(name)
    before = export.proto()
    report = fuse_model(ir.from_proto(before), target="portable")
    assert report.count("mla") == export.mla and report.model is not None
    after = ir.to_proto(report.model)
    assert {n.domain for n in after.graph.node} <= {"", "ai.onnx"}
    assert not after.functions
    kit.same(before, after, *map(export.feeds, export.bindings))


def test_masks_are_read_in_closed_form() -> None:
    """Made in the graph, they need no operand; given ones, and rows that may be without a key, do."""
    for name in ("mla_half", "mla_deepseek_v3_prefill", "mla_deepseek_v3_decode", "mla_causal_op23", "mla_causal_op20"):
        assert configuration(name)["causal"] == 1 and not configuration(name)["has_mask"], name
    for name in ("mla_window", "mla_window_decode"):
        assert configuration(name)["window"] == 5 and not configuration(name)["has_mask"], name
    for name in ("mla_both_op23", "mla_sum"):  # the causal part is; that of keys is an operand as small as it was
        assert configuration(name)["causal"] == 1 and configuration(name)["has_mask"], name
        _, _, after = kit.fused(name)
        node = next(n for n in after.graph.node if n.op_type == "LatentAttention")
        assert "rest_0" in node.input, name
    for name in ("mla_given", "mla_bool", "mla_deepseek_v32_prefill"):
        assert configuration(name)["has_mask"], name


def test_rotations_and_caches_are_what_they_are() -> None:
    for name, rope in {"mla_half": "half", "mla_hub_bias": "deinterleaved", "mla_nope": "none"}.items():
        assert configuration(name)["rope"] == rope, name
    assert configuration("mla_expanded")["rope"] == "interleaved"
    caches = {"mla_expanded": "expanded", "mla_packed": "latent", "mla_static": "expanded", "mla_half": "none"}
    for name, cache in caches.items():
        assert configuration(name)["cache"] == cache, name
    assert configuration("mla_packed")["packed_cache"] and configuration("mla_static")["static_cache"]
    assert configuration("mla_mistral4_decode")["has_q_scale"]


def test_yarn_scales_the_scores() -> None:
    """Rotations for longer prompts come with a factor on the softmax scale, squared."""
    expected = 12**-0.5 * (0.1 * math.log(4.0) + 1.0) ** 2
    assert configuration("mla_deepseek_v3_yarn")["scale"] == pytest.approx(expected, rel=1e-6)
    assert configuration("mla_deepseek_v3_prefill")["scale"] == pytest.approx(12**-0.5, rel=1e-6)


def test_a_gate_for_every_channel_stays_behind() -> None:
    """The attention is fused, its gate is not, and the report says why."""
    _, report, after = kit.fused("mla_channel_gate")
    assert [r.code for r in report.regions[0].not_absorbed] == ["gate"]
    assert configuration("mla_channel_gate")["gate_activation"] == "none"
    assert "Sigmoid" in kit.ops(after.graph)


def test_weights_are_not_copied() -> None:
    """The node reads the graph's own weight."""
    before, _, after = kit.fused("mla_half")
    old = {t.name for t in before.graph.initializer}
    node = next(n for n in after.graph.node if n.op_type == "LatentAttention")
    assert node.input[3] in old


def inside(model: onnx.ModelProto) -> onnx.ModelProto:
    """The same model with its cache joined by the `Attention` node itself."""
    made = onnx.ModelProto.FromString(model.SerializeToString())
    graph = made.graph
    producers = {output: node for node in graph.node for output in node.output}
    attention = next(n for n in graph.node if n.op_type == "Attention")
    joins = [producers[name] for name in attention.input[1:3]]
    attention.input[:] = [
        attention.input[0],
        *(j.input[1] for j in joins),
        attention.input[3],
        *(j.input[0] for j in joins),
    ]
    attention.output.extend(j.output[0] for j in joins)
    kept = [onnx.NodeProto.FromString(n.SerializeToString()) for n in graph.node if n not in joins]
    del graph.node[:]
    graph.node.extend(kept)
    onnx.checker.check_model(made)
    return made


def test_a_cache_inside_the_attention_node_is_taken_in() -> None:
    before = inside(library.export("mla_expanded_op24").proto())
    report, after = kit.fuse(before)
    assert report.count("mla") == 1, kit.why(report)
    assert report.regions[0].config["cache"] == "expanded"
    for past in (3, 21):
        kit.same(before, after, library.feeds_for(before, {"past": past}))
