"""A tiny model and a stand-in for the pipeline: the face is tested by itself, and for real in test_face_real.py."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import onnx_ir as ir
from deltafuse.custom_ops.common.refusal import Refusal
from deltafuse.fusions.result import FusionReport, PassReport, ProofReport, RegionReport
from onnx import TensorProto, helper, numpy_helper


def small_model(opset: int = 20, elements: int = 1024) -> onnx.ModelProto:
    """y = x + w, with a dynamic dimension, metadata, and a weight of ``elements`` float32."""
    weight = numpy_helper.from_array(np.arange(elements, dtype=np.float32), "w")
    graph = helper.make_graph(
        [helper.make_node("Add", ["x", "w"], ["y"], name="add")],
        "small",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", elements])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", elements])],
        [weight],
    )
    model = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10, producer_name="test"
    )
    helper.set_model_props(model, {"author": "somebody"})
    return model


def example_report() -> FusionReport:
    """Three layers: two fused alike, one refused by its proof."""
    good = [
        RegionReport(
            "kda",
            f"model.layers.{i}.attn",
            "fused",
            nodes=1432,
            form="chunked",
            absorbed=["conv", "gate"],
            proof=ProofReport(True, 1.5e-7 * (i + 1), 2e-5, seed=7, structure="s"),
        )
        for i in range(2)
    ]
    reason = "output o: relative error 3.1e-02, tolerance 2e-05"
    bad = RegionReport(
        "kda",
        "model.layers.2.attn",
        "refused",
        nodes=84,
        form="recurrent",
        refusal=Refusal("proof", reason),
        proof=ProofReport(False, 3.1e-2, 2e-5, reason=reason),
    )
    return FusionReport(
        deltafuse_version="0.1.0",
        nodes_before=3000,
        nodes_after=200,
        seconds=1.25,
        regions=[*good, bad],
        passes=[PassReport("fold-shapes", True, 12, 0.5), PassReport("nothing", False, 0, 0.001)],
        repairs=["norm_1: float32 scale cast to bfloat16"],
    )


class FakePipeline:
    """Stands in for ``fusions.pipeline.fuse_model``: copies the model and says what ``example_report`` says."""

    def __init__(self) -> None:
        self.calls: list[dict[str, object]] = []
        self.error: Exception | None = None

    def __call__(
        self,
        model: ir.Model,
        *,
        verify: bool = True,
        target: str = "plugin",
        dry_run: bool = False,
        proof_budget: object = None,
        progress: Callable[[str, int, int], None] | None = None,
    ) -> FusionReport:
        self.calls.append({"verify": verify, "target": target, "dry_run": dry_run, "proof_budget": proof_budget})
        if self.error is not None:
            raise self.error
        if progress:
            progress("prove", 1, 2)
        report = example_report()
        report.verify, report.target, report.dry_run = verify, target, dry_run
        for region in report.regions:
            if region.status == "fused":
                region.status = "recognised" if dry_run else ("fused" if verify else "fused-unproved")
        report.model = None if dry_run else model.clone()
        return report
