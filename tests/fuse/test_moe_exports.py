"""Mixtures of experts: every export fused or refused as it says, with outputs as before, on both targets."""

from __future__ import annotations

from functools import cache

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from attacks.builder import Graph
from attacks.moe_builder import HIDDEN, Moe
from deltafuse.custom_ops.moe.packing import unpack
from deltafuse.fusions.moe import cut
from deltafuse.fusions.pipeline import fuse_model
from deltafuse.fusions.proof import problem
from deltafuse.fusions.result import FusionReport
from exports import library
from exports.processed import TOOLS
from exports.strip import strip
from onnx import numpy_helper

from . import kit

MOE = [n for n in library.names("moe") if library.export(n).moe]
REFUSED = [n for n in library.names("moe") if not library.export(n).moe]
QUANTIZED = library.names("quantized")
#: One of each form that has module scopes.
STRIPPED = ["moe_gather", "moe_where", "moe_dense_eq", "moe_stacked", "moe_bailing", "moe_dense_pairs"]


def fused(model: onnx.ModelProto, target: str = "plugin") -> tuple[FusionReport, onnx.ModelProto]:
    report = fuse_model(ir.from_proto(model), target=target)
    assert report.model is not None
    return report, ir.to_proto(report.model)


@cache
def once(name: str) -> tuple[onnx.ModelProto, FusionReport, onnx.ModelProto]:
    """(the export, the report, the fused model), half of them for each target; treat as read-only."""
    before = library.export(name).proto()
    return before, *fused(before, "portable" if len(name) % 2 else "plugin")


def check_same(name: str, before: onnx.ModelProto, after: onnx.ModelProto) -> None:
    """Outputs at every length. ORT's own optimiser would quantize activations too: quantized models run as written."""
    export = library.export(name)
    if not export.loads:
        before, after = library.widened(before), library.widened(after)
    optimize = name not in QUANTIZED
    first, second = (library.session(m, optimize=optimize) for m in (before, after))
    for binding in export.bindings:
        feeds = library.feeds_for(before, binding, export.shapes)
        error, output = library.worst(library.run(second, feeds), library.run(first, feeds))
        assert error <= export.tolerance, f"{binding}: {output} is off by {error:.1e}"


@pytest.mark.parametrize("name", MOE)
def test_blocks_are_fused_and_give_the_same(name: str) -> None:
    export = library.export(name)
    before, report, after = once(name)
    assert report.count("moe") == export.moe, kit.why(report)
    assert all(r.proof is not None and r.proof.proved for r in report.regions)
    onnx.checker.check_model(after)
    check_same(name, before, after)


@pytest.mark.parametrize("name", STRIPPED)
def test_names_and_metadata_are_not_needed(name: str) -> None:
    report, _ = fused(strip(library.export(name).proto()))
    assert report.count("moe") == 1, kit.why(report)


@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize("name", ["moe_gather", "moe_where_rows", "moe_where", "moe_gpt_oss"])
def test_blocks_are_found_after_other_tools(name: str, tool: str) -> None:
    processed = TOOLS[tool](library.export(name).proto())
    report, after = fused(processed)
    assert report.count("moe") == 1, kit.why(report)
    check_same(name, processed, after)


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_op_cannot_say_is_refused_with_a_reason(name: str) -> None:
    before = library.export(name).proto()
    report, after = fused(before)
    assert report.count("moe") == 0
    assert [r.refusal is not None for r in report.regions if r.op == "moe"] == [True]
    check_same(name, before, after)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("moe_half_scores", "float32"),
        ("moe_hashed", "table"),
    ],
)
def test_refusals_say_what_is_in_the_way(name: str, words: str) -> None:
    report, _ = fused(library.export(name).proto())
    assert words in kit.why(report)


def test_loops_over_experts_that_no_router_chose_are_said() -> None:
    model = onnx.ModelProto()
    model.CopyFrom(library.export("moe_where_rows").proto())
    (last,) = (n for n in model.graph.node if n.op_type == "TopK" and n.name == "node_topk_2__1")
    del last.attribute[:]
    last.attribute.append(onnx.helper.make_attribute("largest", 0))
    report, _ = fused(model)
    assert [r.form for r in report.regions] == ["loop"]
    assert "neither a sigmoid nor a softmax" in kit.why(report)


def test_an_opset_that_the_body_is_not_written_for_is_said() -> None:
    model = onnx.ModelProto()
    model.CopyFrom(library.export("moe_legacy_stacked").proto())
    model.opset_import[0].version = 17
    report, _ = fused(model)
    assert report.count("moe") == 0
    assert "opset 17: the fused node's function body needs 18 to 27: convert the model first" in kit.why(report)


def test_attributes_are_read() -> None:
    """From exports that set them apart from the defaults."""
    found = {name: once(name)[1].regions[-1].config for name in MOE}
    assert (
        found["moe_gather"] | {"n_group": 4, "topk_group": 2, "group_top": 2, "masked_score": "-inf"}
        == found["moe_gather"]
    )
    assert found["moe_zero_mask"]["masked_score"] == "0"
    assert found["moe_masked_weights"]["masked_weights"] == 1
    assert found["moe_masked_weights"]["group_top"] == 1
    assert found["moe_unnormalised"]["norm_topk_prob"] == 0
    assert found["moe_unnormalised"]["has_shared_gate"]
    assert found["moe_eps"]["norm_eps"] == pytest.approx(0.05)
    assert found["moe_stacked_noopt"]["norm_eps"] == pytest.approx(1e-20)
    assert found["moe_linear_bias"]["has_router_bias"]
    assert (found["moe_gelu"]["activation"], found["moe_gelu_tanh"]["activation"]) == ("gelu", "gelu_tanh")
    assert (found["moe_relu2_plain"]["activation"], found["moe_relu2_plain"]["gated"]) == ("relu2", 0)
    assert (found["moe_clamp_before"]["clamp"], found["moe_clamp_after"]["clamp"]) == ("before", "after")
    assert found["moe_clamp_after"]["gate_limit"] == found["moe_clamp_after"]["up_limit"] == 0.25
    assert found["moe_softmax_no_groups"]["score_function"] == "softmax"
    assert found["moe_softmax_no_groups"]["n_group"] == 1
    assert not found["moe_half_logits"]["has_router_weight"]
    assert found["moe_nemotron_latent"]["hidden_size"] == 16
    for name in MOE:
        if name.startswith("moe_zero_") and name != "moe_zero_mask":
            assert found[name]["zero_experts"] == 2, name
        if name.startswith("moe_biased_"):
            assert found[name]["has_gate_up_bias"] and found[name]["has_down_bias"], name
    assert found["moe_biased_experts"]["has_shared_gate_up_bias"]
    assert found["moe_norm_least"]["norm_min"] == pytest.approx(1.7)
    assert found["moe_norm_least"]["norm_eps"] == pytest.approx(0.1)
    assert found["moe_ernie"]["norm_min"] == pytest.approx(1e-12)
    gpt = {"activation_alpha": 1.702, "up_offset": 1.0, "clamp": "before", "has_down_bias": True, "norm_topk_prob": 1}
    assert found["moe_gpt_oss"] | gpt == found["moe_gpt_oss"]
    assert found["moe_gpt_oss"]["choose_by_logits"] == 0
    assert (found["moe_kolibri1"]["choose_by_logits"], found["moe_kolibri1"]["has_expert_bias"]) == (1, True)
    for name in ("moe_scaled_norm", "moe_shared_norm"):
        scaled = {"norm_topk_prob": 1, "routed_scaling_factor": 2.5}
        assert found[name] | scaled == found[name], name
    assert found["moe_top_one"] | {"top_k": 1, "norm_topk_prob": 0} == found["moe_top_one"]
    assert not found["moe_legacy_normed_router"]["has_router_weight"]
    assert (found["moe_cohere2"]["choose_by_logits"], found["moe_cohere2"]["score_function"]) == (1, "sigmoid")


def test_limits_of_layers_may_differ() -> None:
    regions = fuse_model(library.export("moe_two_layers").model()).regions
    assert [r.config["gate_limit"] for r in regions] == [0.5, 0.3]


@pytest.mark.parametrize("name", QUANTIZED)
def test_stored_numbers_are_kept_to_the_bit(name: str) -> None:
    """The first expert's down projection: the same numbers, scales and zero points, laid out as the op has them."""
    before = library.export(name).proto()
    report, after = fused(before)
    config = report.regions[0].config
    kind = config["weight_format"]
    arrays = {t.name: numpy_helper.to_array(t) for t in after.graph.initializer}
    prefix = "moe.0.down"
    made = unpack(arrays[f"{prefix}_weight"], kind).astype(np.float64)
    scale = arrays[f"{prefix}_scale"].astype(np.float64)
    zero = arrays[f"{prefix}_zero_point"].astype(np.float64) if config["has_zero_point"] else np.zeros_like(scale)
    each = config["block_size"] or made.shape[-1]
    wide = [np.repeat(a, each, axis=-1)[..., : made.shape[-1]] for a in (scale, zero)]
    values = (made - wide[1]) * wide[0]
    assert kind in name
    assert np.array_equal(values[0], _dequantized(before, values.shape[1:]))


def _dequantized(model: onnx.ModelProto, shape: tuple[int, ...]) -> np.ndarray:
    """The first expert's down projection [D, I] of the unfused model, in float64."""
    arrays = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    nodes = [n for n in model.graph.node if n.op_type == "DequantizeLinear"]
    for node in nodes:
        stored = arrays[node.input[0]].astype(np.float64)
        scale = arrays[node.input[1]].astype(np.float64)
        zero = arrays[node.input[2]].astype(np.float64) if len(node.input) > 2 else np.zeros_like(scale)
        settings = {a.name: a.i for a in node.attribute}
        axis, block = settings["axis"], settings.get("block_size", 0)
        if block:
            scale, zero = (np.repeat(a, block, axis=axis) for a in (scale, zero))
        elif scale.ndim:
            line = [-1 if i == axis else 1 for i in range(stored.ndim)]
            scale, zero = scale.reshape(line), zero.reshape(line)
        value = (stored - zero) * scale
        value = value[0] if value.ndim == 3 else value
        for turned in (value, value.T):
            if turned.shape == shape and ("down" in node.input[0] or node in nodes[2::3]):
                return turned
    raise AssertionError("no down projection was found")


def test_scales_that_output_channels_share_are_refused_with_a_reason() -> None:
    model = onnx.ModelProto()
    model.CopyFrom(library.export("moe_int4_dense").proto())
    tensors = {t.name: t for t in model.graph.initializer}
    for node in (n for n in model.graph.node if n.op_type == "DequantizeLinear"):
        settings = {a.name: a for a in node.attribute}
        axis = settings["axis"].i = 1 - settings["axis"].i % 2
        dims = list(tensors[node.input[0]].dims)
        dims[axis] //= settings["block_size"].i
        tensors[node.input[1]].CopyFrom(numpy_helper.from_array(np.full(dims, 0.1, np.float32), node.input[1]))
    report, after = fused(model)
    assert report.count("moe") == 0
    assert "along another axis than their input channels" in kit.why(report)
    check_same("moe_int4_dense", model, after)


def test_routing_that_others_read_stays() -> None:
    """ids and weights are graph outputs: the router goes on making them beside the fused node."""
    report, after = fused(library.export("moe_routing_shown").proto())
    assert report.count("moe") == 1
    assert any("used elsewhere" in note for r in report.regions for note in r.notes)
    assert [o.name for o in after.graph.output] == ["y", "ids", "weights"]


def test_the_shared_expert_may_stay_outside() -> None:
    """HY-V4's shared expert is not clamped, its routed ones are: the op has one clamp for both."""
    report, _ = fused(library.export("moe_hy_v4").proto())
    assert report.regions[0].config["shared_intermediate_size"] == 0
    assert any(r.code == "shared" for r in report.regions[0].not_absorbed)


def test_biases_that_show_beside_a_mask_that_is_added() -> None:
    model = onnx.ModelProto()
    model.CopyFrom(library.export("moe_added_mask").proto())
    (bias,) = (t for t in model.graph.initializer if t.name == "gate.e_score_correction_bias")
    bias.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(bias) + np.float32(70.0), bias.name))
    report, _ = fused(model)
    assert report.count("moe") == 0
    assert "shows beside -1e+09" in kit.why(report)


def test_a_gate_with_a_bias_leaves_the_shared_expert_outside() -> None:
    def gated(g: Graph, x: str) -> str:
        gate = g.op("Add", g.op("MatMul", x, g.weight(HIDDEN, 1)), g.weight(1))
        return g.op("Mul", x, g.op("Sigmoid", gate))

    report, _ = fused(Moe(shared=gated).model())
    assert report.count("moe") == 1, kit.why(report)
    assert ["the gate of the shared expert has a bias" in str(r) for r in report.regions[0].not_absorbed] == [True]


@pytest.mark.parametrize(
    "name",
    [
        *("moe_gather", "moe_gather_interleaved", "moe_gather_turned", "moe_stacked_matmul", "moe_dense_onehot"),
        *("moe_where_put", "moe_scatter_pairs", "moe_legacy_where", "moe_int8_where", "moe_uint4_stacked"),
        *("moe_biased_gather", "moe_biased_stacked", "moe_biased_where", "moe_gpt_oss"),
        *("moe_zero_turns", "moe_zero_gather", "moe_zero_stacked", "moe_zero_choices"),
        *("moe_where_column", "moe_where_inside", "moe_dense_inside", "moe_stacked_inside"),
        *("moe_top_one", "moe_legacy_none", "moe_legacy_scatter_add", "moe_behind"),
        *("moe_gather_three", "moe_gather_row", "moe_picked", "moe_picked_stacked", "moe_any_choice"),
        *("moe_int8_gathered", "bailing_hf_prefill_dyn", "bailing_hf_decode_ortcpu"),
    ],
)
def test_every_form_can_be_cut_down(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small blocks proved as blocks of real size are: on some of their channels."""
    monkeypatch.setattr(problem, "CUT_ABOVE", 0)
    monkeypatch.setattr(cut, "HIDDEN", 7)
    monkeypatch.setattr(cut, "INTER", 3)
    regions = fuse_model(library.export(name).model(), dry_run=True, fusions=["moe"]).regions
    assert [r.status for r in regions] == ["recognised"], regions[0].refusal
    assert regions[0].proof is not None
    assert regions[0].proof.heads, "the proof ran on the whole block"


@pytest.mark.parametrize("name", ["moe_1", "moe_64"])
def test_blocks_of_real_size_are_proved_within_the_budget(name: str) -> None:
    """Hidden 2560, 64 experts of 768: as exported they take up to 5.7 GiB to run. No proof reads their weights."""
    report = fuse_model(ir.from_proto(library.real_layer(name, zeros=True)))
    assert report.count("moe") == 1, kit.why(report)
    proof = report.regions[0].proof
    assert proof is not None
    assert proof.proved
    assert report.nodes_after == 1
