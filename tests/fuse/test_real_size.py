"""Real-size layers (hidden 2560, 32 heads of 128, float16), frozen at 512 and 2048 tokens as exporters leave them."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from deltafuse.fusions.pipeline import fuse_model
from exports import library

from . import kit


@pytest.mark.parametrize(("name", "tokens"), [("kda_512", 512), ("kda_2048", 2048)])
def test_frozen_real_layers_are_proved_and_fused(name: str, tokens: int) -> None:
    """As exported, 2048 tokens take 17 GiB to run: the proof must do with the default budget of 4 GiB and 60 s."""
    report = fuse_model(ir.from_proto(library.real_layer(name)))
    assert report.count("kda") == 1, kit.why(report)
    proof = report.regions[0].proof
    assert proof is not None
    assert proof.proved
    assert all(case["tokens"] == tokens for case in proof.cases)
    assert report.nodes_after < 30


def test_frozen_latent_attention_is_proved_on_two_heads() -> None:
    """All heads' scores of 2048 tokens would take 3 GiB: two heads prove all, in the default budget."""
    report = fuse_model(ir.from_proto(library.real_layer("mla_2048")))
    assert report.count("mla") == 1, kit.why(report)
    proof = report.regions[0].proof
    assert proof is not None and proof.proved
    assert proof.heads == [0, 31]
    assert report.regions[0].config["causal"] == 1
    assert report.nodes_after < 12


def test_a_step_over_a_cache_keeps_its_cache() -> None:
    """One token of each sequence: fused, with transformers' two caches as they were."""
    model = library.real_layer("mla_step")
    report = fuse_model(ir.from_proto(model))
    assert report.count("mla") == 1, kit.why(report)
    proof = report.regions[0].proof
    assert proof is not None and proof.proved
    assert report.nodes_after < 12
    assert report.model is not None
    assert [o.name for o in report.model.graph.outputs] == ["y", "present.latents", "present.rotated"]


def test_a_frozen_layer_runs_fused() -> None:
    """The fused layer of 512 tokens, in stock ORT: finite, and no token sees a later one."""
    report = fuse_model(ir.from_proto(library.real_layer("kda_512")), verify=False)
    assert report.model is not None
    session = library.session(report.model)
    x = np.random.default_rng(0).standard_normal((1, 512, 2560)).astype(np.float16)
    changed = x.copy()
    changed[:, 300:] = 0
    first, second = (next(iter(library.run(session, {"x": inputs}).values())) for inputs in (x, changed))
    assert np.isfinite(first).all()
    assert library.error(second[:, :300], first[:, :300]) < 1e-3
    assert library.error(second[:, 300:], first[:, 300:]) > 1e-2
