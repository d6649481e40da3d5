"""The way of one model: clean up, recognise, prove, rewrite, lower to the target, check."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping

import onnx_ir as ir
import onnx_ir.passes.common as common

from ..custom_ops.common.quantize_matrix import Statistics
from ..custom_ops.common.scheme import Scheme
from . import plugins
from .cleanup import cleanup_passes
from .cleanup.axes import NameAxes
from .fuse import FusePass
from .kda.fuse import FuseKda
from .mla.fuse import FuseMla
from .mla.latent_cache import LatentCache
from .mla.quantized_cache import SeenChannels
from .moe.fuse import FuseMoe
from .passes import Pass, PassManager, Progress
from .proof import ProofBudget
from .quantize import Quantize, RaiseOpset, Sources
from .result import FusionReport, PassReport
from .rewrite import remove_unused

TARGETS = ("plugin", "portable")
#: The ops' passes, in the order in which they run.
FUSERS: tuple[type[FusePass], ...] = (FuseKda, FuseMla, FuseMoe)


class InlineFunctions(Pass):
    """The portable target: calls of fused functions become their bodies, in standard ops."""

    name = "inline-functions"

    def __init__(self, domains: Collection[str] = ("deltafuse",)) -> None:
        self.domains = frozenset(domains)

    def run(self, model: ir.Model, report: PassReport) -> None:
        report.matched = sum(1 for n in model.graph if n.domain in self.domains)
        if not report.matched:
            return
        common.InlinePass(criteria=lambda f: f.domain in self.domains)(model)
        common.RemoveUnusedFunctionsPass()(model)
        remove_unused(model)  # what stood for outputs that a call did not ask for
        common.RemoveUnusedOpsetsPass()(model)
        report.changed = True


def count_nodes(model: ir.Model) -> int:
    """Nodes of the main graph and its subgraphs; function bodies are not counted."""
    return sum(1 for _ in model.graph.all_nodes())


def fuse_model(
    model: ir.Model,
    *,
    verify: bool = True,
    target: str = "plugin",
    dry_run: bool = False,
    proof_budget: ProofBudget | None = None,
    progress: Progress | None = None,
    fusions: Collection[str] | None = None,
    quantize: Mapping[str, Scheme] | None = None,
    statistics: Mapping[str, Statistics] | None = None,
    channels: Mapping[str, SeenChannels] | None = None,
    latent_cache: bool = False,
) -> FusionReport:
    """Fuse what can be recognised and proved.

    Args:
        model: left as it is; the report's model is a new one that shares its (lazy) weights.
        verify: prove each distinct structure before it is replaced.
        target: "plugin": calls of deltafuse functions; "portable": their bodies inlined, standard ops only.
        dry_run: recognise and prove, change nothing; the report's model is None then.
        proof_budget: memory and time of one structure's proof.
        progress: called with (what, done, total).
        fusions: keys of the fusions to look for; None: all that there are.
        quantize: schemes by group of weights, and of caches (``quantize.parse_quantize``). A dry run quantizes nothing.
        latent_cache: let caches of keys and values become caches of latents, which changes the model's signature; the
            report's notes have the new names and shapes. A dry run leaves them.
        statistics: of activations, by their value's name, for quantizing with them.
        channels: what a calibration saw of values' channels, by name, for caches of int8.

    Returns:
        The report, with the new model.

    Raises:
        ValueError: an unknown target, or a model that can't be quantized as asked.
    """
    if target not in TARGETS:
        raise ValueError(f"target {target!r}: expected one of {', '.join(TARGETS)}")
    start = time.perf_counter()
    report = FusionReport(target=target, verify=verify, dry_run=dry_run, nodes_before=count_nodes(model))
    work = model.clone()
    outside = plugins.load()
    report.warnings += outside.problems
    if dry_run and (quantize or latent_cache):
        asked = " and ".join(name for name, given in (("quantize", quantize), ("latent_cache", latent_cache)) if given)
        report.warnings.append(f"{asked}: not tried, since a dry run changes nothing")
    fusers = [
        fuser(verify=verify, apply=not dry_run, budget=proof_budget, progress=progress)
        for fuser in (*FUSERS, *outside.fusers)
        if fusions is None or fuser.op.key in fusions
    ]
    axes = NameAxes()
    passes: list[Pass] = [axes, *cleanup_passes(), *(other() for other in outside.passes), *fusers]
    if latent_cache and not dry_run and any(fuser.op.key == "mla" for fuser in fusers):
        passes.append(LatentCache(verify=verify))
    quantizer = Quantize(quantize, statistics, progress, Sources(work), channels) if quantize and not dry_run else None
    if quantizer is not None:
        passes = [RaiseOpset(quantizer.schemes), *passes, quantizer]
    if target == "portable" and not dry_run:
        passes.append(InlineFunctions({"deltafuse", *outside.domains}))
    report.passes = PassManager(passes, progress)(work)
    axes.restore(work)
    report.regions = [region for fuser in fusers for region in fuser.regions]
    report.repairs = [n for p in report.passes if p.name.startswith("repair") for n in p.notes]
    report.repairs += [f"{r.name}: {n}" for r in report.regions for n in r.notes if n.startswith("repaired")]
    if quantizer is not None:
        report.quantization = quantizer.result
    if not dry_run:
        report.model = work
        report.nodes_after = count_nodes(work)
    else:
        report.nodes_after = report.nodes_before
    report.seconds = time.perf_counter() - start
    return report
