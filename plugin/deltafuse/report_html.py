"""A ``FusionReport`` as one HTML file that needs nothing else: no network, no fonts, no scripts of others.

    report = deltafuse.fuse("in.onnx", "out.onnx", report="out.html")

or, with what was measured later, :func:`page` and :func:`write`. Names out of the model are escaped, and the page's own
content security policy lets no other script or request through.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnx_ir as ir

from . import model_io, model_save, show
from .errors import OptionError
from .report_html_graph import graph, histogram
from .report_html_parts import Html, code, details, items, join, number, pairs, section, table, tag, text
from .report_html_picture import Picture, picture
from .report_html_plots import placement, quantization, times
from .report_html_regions import group, left_alone, near_misses, regions, repairs

if TYPE_CHECKING:
    from .api import ModelSource
    from .assigned import Assignment
    from .fusions.result import FusionReport

SUFFIXES = (".html", ".htm")


def is_html(path: str | os.PathLike[str]) -> bool:
    """Is a report of this name a page? (All others are JSON.)"""
    return Path(path).suffix.lower() in SUFFIXES


def write(
    path: str | os.PathLike[str],
    report: FusionReport,
    source: ModelSource,
    *,
    measured: Iterable[Mapping[str, Any]] = (),
    assignment: Assignment | None = None,
) -> None:
    """Write the page.

    Args:
        path: the file.
        report: what :func:`deltafuse.fuse` returned.
        source: the model before, as :func:`deltafuse.fuse` takes it.
        measured: what ``deltafuse bench --json`` and ``deltafuse run --json`` printed, see :func:`read_measured`.
        assignment: of a session of the new model.

    Raises:
        OutputError: it cannot be written.
    """
    # A model in memory is not checked again: its weights may be gone by now, and nothing here reads them.
    model = source if isinstance(source, ir.Model) else model_io.load(source).model
    made = page(report, picture(model, report), measured=measured, assignment=assignment)
    model_save.write_text(Path(path), made)


def read_measured(files: Iterable[str | os.PathLike[str]]) -> list[dict[str, Any]]:
    """What ``deltafuse bench --json`` or ``deltafuse run --json`` printed into these files.

    Raises:
        OptionError: a file cannot be read, or is something else.
    """
    made = []
    for file in files:
        try:
            found = json.loads(Path(file).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            reason = getattr(error, "strerror", None) or error
            raise OptionError(
                f"times {os.fspath(file)}: expected what `deltafuse bench --json` prints: {reason}"
            ) from error
        if not isinstance(found, dict) or not ("variants" in found or "nodes" in found):
            raise OptionError(f"times {os.fspath(file)}: expected what `deltafuse bench --json` prints, with variants")
        made.append(found)
    return made


def page(
    report: FusionReport,
    shown: Picture,
    *,
    measured: Iterable[Mapping[str, Any]] = (),
    assignment: Assignment | None = None,
) -> str:
    """The page's text; see :func:`write`. ``shown``: of :func:`deltafuse.report_html_picture.picture`."""
    found = list(measured)
    groups, group_of = group(report.regions)
    sections = [
        ("What was done", _sizes(report), "sizes"),
        ("The graph, before and after", graph(shown, report, group_of), "graph"),
        ("Regions", regions(report, shown, groups), "regions"),
        ("Near misses", near_misses(report, groups), "near-misses"),
        ("Repairs", repairs(report), "repairs"),
        ("Quantization", _quantized(report), "quantization"),
        ("Times", join(times(bench) for bench in found if "variants" in bench), "times"),
        ("Who runs what", placement(_placements(found, assignment)), "placement"),
        ("Operators", histogram(shown), "operators"),
        ("Passes", _passes(report), "passes"),
    ]
    made = [(title, section(title, inner, id_), id_) for title, inner, id_ in sections if inner]
    links = tag("nav", join(tag("a", text(title), href=f"#{id_}") for title, _, id_ in made), aria_label="Sections")
    body = join([_header(report), links, tag("main", join(part for _, part, _ in made)), _footer(report)])
    return _document(f"{_name(report)} · deltafuse", body)


def _document(title: str, body: Html) -> str:
    here = Path(__file__)
    style = here.with_name("report_html.css").read_text(encoding="utf-8")
    script = here.with_name("report_html.js").read_text(encoding="utf-8")
    allowed = {"default": "'none'", "style": f"'{_hash(style)}'", "script": f"'{_hash(script)}'", "img": "data:"}
    policy = (
        "".join(f"{kind}-src {source}; " for kind, source in allowed.items()) + "base-uri 'none'; form-action 'none'"
    )
    head = join(
        [
            Html('<meta charset="utf-8">'),
            Html(f'<meta http-equiv="Content-Security-Policy" content="{text(policy)}">'),
            Html('<meta name="viewport" content="width=device-width, initial-scale=1">'),
            Html('<meta name="color-scheme" content="light dark">'),
            Html('<link rel="icon" href="data:,">'),
            tag("title", text(title)),
            Html(f"<style>{style}</style>"),
        ],
        "\n",
    )
    lines = ["<!doctype html>", '<html lang="en">', "<head>", head, "</head>", "<body>", body]
    return "\n".join([*lines, f"<script>{script}</script>", "</body>", "</html>", ""])


def _hash(source: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()


def _name(report: FusionReport) -> str:
    return os.path.basename(report.source) or "model"


def verdict(report: FusionReport) -> tuple[str, str]:
    """What became of the model, as a kind ("good", "warn", "bad") and a sentence."""
    by_status: dict[str, int] = {}
    for region in report.regions:
        by_status[region.status] = by_status.get(region.status, 0) + 1
    fused, unproved, seen = (by_status.get(status, 0) for status in ("fused", "fused-unproved", "recognised"))
    refused = by_status.get("refused", 0)
    parts = []
    if fused:
        parts.append(f"{_blocks(fused)} fused, {'it was' if fused == 1 else 'each'} proved first")
    if unproved:
        parts.append(f"{_blocks(unproved)} fused without a proof")
    if seen:
        proved = sum(1 for r in report.regions if r.status == "recognised" and r.proof and r.proof.proved)
        parts.append(f"{_blocks(seen)} recognised{f', {proved} proved' if proved else ''}; nothing changed")
    if refused:
        parts.append(f"{_blocks(refused)} left as {'it was' if refused == 1 else 'they were'}")
    had = sum(report.already_fused.values())
    done = report.quantization
    smaller = [] if done is None else [n for n, found in (("weights", done.tensors), ("caches", done.caches)) if found]
    if not parts:
        rest = f"{' and '.join(smaller)} were quantized" if smaller else "the model is as it was"
        if had:
            return "good", f"{_blocks(had)} had been fused before, no more were recognised; {rest}."
        return "bad", f"Nothing was recognised; {rest}."
    if had:
        parts.append(f"{_blocks(had)} had been fused before")
    kind = "warn" if unproved or refused else "good"
    if not (fused or unproved or seen):
        kind = "bad"
    return kind, "; ".join(parts) + "."


def _blocks(count: int) -> str:
    return f"{count} block{'s' if count != 1 else ''}"


def _header(report: FusionReport) -> Html:
    kind, said = verdict(report)
    counts: dict[str, int] = {}
    for region in report.regions:
        if region.status != "refused":
            counts[region.op] = counts.get(region.op, 0) + 1
    facts: list[tuple[str, Html]] = [("target", text(report.target))]
    if counts:
        done = "recognised" if report.dry_run else "fused"
        facts.append((done, text(", ".join(f"{count} {op}" for op, count in counts.items()))))
    if report.opsets:
        opsets = ", ".join(f"{domain or 'ai.onnx'} {version}" for domain, version in report.opsets.items())
        facts.append(("opset", text(f"{opsets}; IR {report.ir_version}")))
    facts.append(("deltafuse", text(report.deltafuse_version)))
    facts.append(("ONNX Runtime", text(_ort_version())))
    facts.append(("took", text(show.seconds(report.seconds))))
    parts = [
        tag("p", text("deltafuse report"), class_="kicker"),
        tag("h1", text(_name(report))),
        tag("p", text(said), class_=f"verdict {kind}"),
        pairs(facts, grouped=True),
    ]
    if report.warnings:
        parts.append(items([text(warning) for warning in report.warnings], "warnings"))
    return tag("header", join(parts))


def _ort_version() -> str:
    ort = sys.modules.get("onnxruntime")  # it ran the proofs
    return str(getattr(ort, "__version__", "")) or "not used"


def _sizes(report: FusionReport) -> Html:
    rows = [[text("nodes"), number(report.nodes_before), number(report.nodes_after)]]
    if report.output:
        rows.append([text("model file"), _size(report.source_bytes), _size(report.output_bytes)])
        if report.source_data_bytes or report.output_data_bytes:
            rows.append([text("weights beside it"), _size(report.source_data_bytes), _size(report.output_data_bytes)])
    files = [("read", code(report.source))] if report.source else []
    if report.output:
        files.append(("written", code(report.output)))
    if report.output_data:
        files.append(("weights", code(report.output_data)))
    if not report.verify and not report.dry_run:
        files.append(("not verified", text("--no-verify; the new model's metadata say so")))
    return join([table(["", "before", "after"], rows, (1, 2)), pairs(files)])


def _size(count: int) -> Html:
    return text(show.size(count) if count else "–")


def _quantized(report: FusionReport) -> Html:
    found = getattr(report, "quantization", None)
    return quantization(asdict(found)) if found is not None else Html("")


def _placements(
    measured: Iterable[Mapping[str, Any]], assignment: Assignment | None
) -> list[tuple[str, Mapping[str, Any], Sequence[Mapping[str, Any]], str]]:
    made: list[tuple[str, Mapping[str, Any], Sequence[Mapping[str, Any]], str]] = []
    if assignment is not None:
        ours = [vars(node) for node in assignment if not node.ep or node in assignment.fused]
        made.append(("of this model", assignment.counts(), ours, assignment.note))
    for found in measured:
        if isinstance(found.get("nodes"), Mapping):
            made.append((f"run on {found.get('device', '')}", found["nodes"], (), str(found.get("note") or "")))
        for variant in found.get("variants") or ():
            if isinstance(variant, Mapping) and isinstance(variant.get("nodes"), Mapping) and variant["nodes"]:
                made.append((f"{variant.get('name', '')}, {variant.get('device', '')}", variant["nodes"], (), ""))
    return made


def _passes(report: FusionReport) -> Html:
    rows = [
        [
            text(p.name),
            text("yes" if p.changed else ""),
            number(p.matched) if p.matched else Html(""),
            text(show.seconds(p.seconds)),
            text("; ".join(p.notes)),
        ]
        for p in report.passes
    ]
    if not rows:
        return Html("")
    total = show.seconds(sum(p.seconds for p in report.passes))
    listed = table(["pass", "changed", "matched", "time", "notes"], rows, (2, 3))
    alone = left_alone(report)
    parts = [details(text(f"{len(rows)} passes, {total}"), listed)]
    if alone:
        parts.append(details(text("What passes left alone, and why"), alone))
    return join(parts)


def _footer(report: FusionReport) -> Html:
    said = f"Written by deltafuse {report.deltafuse_version}. Nothing on this page is fetched from elsewhere."
    button = tag("button", text("Open all"), type="button", id="open-all", hidden="")
    return tag("footer", join([tag("p", text(said)), button]))
