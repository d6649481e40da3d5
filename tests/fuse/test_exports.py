"""Every export: all KDA layers fused, the interface kept, and outputs as before and as PyTorch gives them."""

from __future__ import annotations

import onnx
import onnx_ir as ir
import pytest
from deltafuse.fusions.pipeline import fuse_model
from exports import library

from . import kit

KDA = library.names(kda=True)
OTHERS = [e.name for e in library.all_exports().values() if not (e.kda or e.mla or e.moe) and "unstable" not in e.tags]
#: Stripped too: all of the shared archive, and one or two of each other form.
STRIPPED = [n for n in KDA if n in library.names("shared")] + [
    "kimi_prefill_dyn",
    "kimi_decode_op23",
    "bailing_prefill_states_dyn",
    "bailing_prompt_piece",
    "bailing_dynbatch_decode",
    "bailing_noopt_decode",
    "bailing_decode_bf16_op23",
    "glm5_decode",
    "hybrid4_decode",
    "conv3_scan_states_batch2",
    "while_batch2",
    "decode_vfirst",
    "decode_gva_op24",
    "chunk16_T48_gva_nostate",
    "neumann16_T48",
    "la27_prompt",
    "bailing_hf_decode_ortcpu",
]
#: What makes a recurrence: none may be left once every layer is fused.
RECURRENCE = {"Exp", "Scan", "Loop", "LinearAttention", "CausalConvWithState", "Softplus", "ReduceL2"}


def check_fused(name: str, stripped: bool) -> None:
    """Counts, validity, outputs at every valid length, and the truth at every length."""
    export = library.export(name)
    before, report, after = kit.fused(name, stripped)
    assert report.count("kda") == export.kda, kit.why(report)
    assert report.count("mla") == export.mla, kit.why(report)
    assert report.count("moe") == export.moe, kit.why(report)
    assert kit.calls(after) == export.kda
    assert all(r.proof is not None and r.proof.proved for r in report.regions if r.status == "fused")
    assert not RECURRENCE & kit.ops(after.graph)
    assert report.nodes_after <= report.nodes_before
    if kit.valid(before):
        onnx.checker.check_model(after)
    if export.loads:
        kit.same(before, after, *map(export.feeds, export.bindings), tolerance=export.tolerance)


@pytest.mark.parametrize("name", KDA)
def test_all_layers_are_fused(name: str) -> None:
    check_fused(name, stripped=False)


@pytest.mark.parametrize("name", STRIPPED)
def test_names_and_metadata_are_not_needed(name: str) -> None:
    check_fused(name, stripped=True)


@pytest.mark.parametrize("name", [n for n in KDA if library.export(n).truth])
def test_matches_pytorch(name: str) -> None:
    """At every length of the truth file, those over 64 tokens included, where the exports themselves fail.

    The truth of a half-precision model is its float32 twin's. bfloat16 models run widened, for want of kernels.
    """
    export = library.export(name)
    _, _, after = kit.fused(name)
    session = library.session(library.widened(after) if "bf16" in export.tags else after)
    for case, (inputs, truth) in export.truths().items():
        error, output = library.worst(library.run(session, inputs), truth)
        assert error <= export.tolerance, f"{case}: {output} is off by {error:.1e}"


@pytest.mark.parametrize("name", library.names("half"))
def test_half_precision_models_keep_their_weights(name: str) -> None:
    """Widened to float32, before and after agree as closely as float32 models do: no weight or constant was rounded."""
    export = library.export(name)
    before, _, after = kit.fused(name)
    wide = library.widened(before)
    feeds = library.feeds_for(wide, export.bindings[0], export.shapes)
    kit.same(wide, library.widened(after), feeds)


@pytest.mark.parametrize("name", KDA)
def test_the_interface_is_kept(name: str) -> None:
    """Names, element types, dynamic dimensions and order of inputs and outputs; opset; the model's metadata."""
    before, _, after = kit.fused(name)
    for side in ("input", "output"):
        old, new = getattr(before.graph, side), getattr(after.graph, side)
        assert [v.name for v in new] == [v.name for v in old]
        for a, b in zip(old, new, strict=True):
            assert b.type.tensor_type.elem_type == a.type.tensor_type.elem_type, a.name
            assert library.shape_of(b) == library.shape_of(a), a.name
    versions = {o.domain: o.version for o in after.opset_import}
    assert versions[""] == library.export(name).opset
    assert versions["deltafuse"] == 1
    assert after.ir_version >= before.ir_version


@pytest.mark.parametrize("name", OTHERS)
def test_other_blocks_are_left_alone(name: str) -> None:
    """No KDA in them: nothing is fused, and what comes out computes the same."""
    export = library.export(name)
    before, report, after = kit.fused(name)
    assert report.count("kda") == 0
    assert kit.calls(after) == 0
    assert not after.functions
    kit.same(before, after, *map(export.feeds, export.bindings), tolerance=1e-6)


@pytest.mark.parametrize("name", library.names("unstable"))
def test_an_imprecise_original_is_never_made_worse(name: str) -> None:
    """Its float32 arithmetic fails for hard keys. Fused or refused with that reason, easy inputs give the same."""
    export = library.export(name)
    before, report, after = kit.fused(name)
    if not report.count("kda"):
        assert "relative error" in kit.why(report)
    kit.same(before, after, export.feeds())


def test_the_unloadable_norm_is_repaired() -> None:
    """bfloat16 RMSNormalization with a float32 scale: ORT refuses the export, and takes the fused float16 twin."""
    with pytest.raises(Exception, match=r"bound to different types"):
        library.session(library.export("bailing_decode_f16_op23").proto())
    for name in ("bailing_decode_f16_op23", "bailing_decode_bf16_op23", "bailing_prefill_bf16_op23"):
        _, report, after = kit.fused(name)
        assert report.repairs, name
        onnx.checker.check_model(after, full_check=True)
    library.session(kit.fused("bailing_decode_f16_op23")[2])


def test_a_prompt_export_is_repaired_beyond_64_tokens() -> None:
    before, report, after = kit.fused("bailing_prefill_dynauto_batched")
    export = library.export("bailing_prefill_dynauto_batched")
    for binding in export.beyond:
        feeds = export.feeds(binding)
        with pytest.raises(Exception, match="Non-zero status code"):
            library.run(before, feeds)
        library.run(after, feeds)
    assert any("64" in note for note in report.repairs)


@pytest.mark.parametrize(
    "name", ["bailing_prefill_states", "kimi_decode", "while_batch2", "la27_prompt", "decode_gva_op24"]
)
def test_portable_target_uses_standard_ops_only(name: str) -> None:
    export = library.export(name)
    before = export.proto()
    report = fuse_model(ir.from_proto(before), target="portable")
    assert report.count("kda") == export.kda
    assert report.model is not None
    after = ir.to_proto(report.model)
    assert {n.domain for n in after.graph.node} <= {"", "ai.onnx"}
    assert not after.functions
    onnx.checker.check_model(after)
    kit.same(before, after, *map(export.feeds, export.bindings))


@pytest.mark.parametrize("name", ["bailing_prefill_static_batched", "kda_while_dynT", "hybrid4_decode"])
def test_the_argument_is_never_changed(name: str) -> None:
    model = library.export(name).model()
    before = ir.to_proto(model).SerializeToString(deterministic=True)
    fuse_model(model)
    assert ir.to_proto(model).SerializeToString(deterministic=True) == before


@pytest.mark.parametrize("name", ["bailing_prefill_static_batched", "kda_scan_dynT", "hybrid4_decode"])
def test_fusing_twice_changes_nothing_more(name: str) -> None:
    _, _, once = kit.fused(name)
    report, twice = kit.fuse(once)
    assert report.count("kda") == 0
    assert kit.calls(twice) == kit.calls(once)
    kit.same(once, twice, library.export(name).feeds(), tolerance=1e-6)


def test_a_dry_run_says_the_same_and_makes_nothing() -> None:
    report = fuse_model(library.export("hybrid4_decode").model(), dry_run=True)
    assert report.model is None
    assert [(r.op, r.status) for r in report.regions] == [
        *[("kda", "recognised")] * 3,
        ("mla", "recognised"),
        *[("moe", "recognised")] * 3,
    ]


def test_without_proof_it_is_said() -> None:
    report = fuse_model(library.export("kimi_decode").model(), verify=False)
    assert [(r.status, r.proof) for r in report.regions] == [("fused-unproved", None)] * 3


def test_equal_layers_share_one_proof() -> None:
    _, report, _ = kit.fused("hybrid4_decode")
    proofs = [r.proof for r in report.regions if r.proof is not None and r.op == "kda"]
    assert sum(not p.reused for p in proofs) == 1
    assert len({p.structure for p in proofs}) == 1
