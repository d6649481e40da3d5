"""What is known beside the fusion itself: errors of quantization, times, who runs which node."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from . import show
from .report_html_parts import Html, bar, code, details, items, join, number, paragraph, small, table, tag, text

#: Size of the plot's drawing, in its own units.
WIDTH, HEIGHT, LEFT, BOTTOM = 640, 220, 48, 26
_KINDS = 6  # colours of the plot


def quantization(found: Mapping[str, Any]) -> Html:
    """What was quantized: each tensor's error by its place in the model as a plot, and the numbers.

    Args:
        found: a :class:`deltafuse.fusions.result.QuantizationReport` as plain data.
    """
    tensors = [entry for entry in found.get("tensors") or () if isinstance(entry, Mapping)]
    parts = []
    asked = ", ".join(f"{group} as {scheme}" for group, scheme in (found.get("schemes") or {}).items())
    said = [f"Asked for: {asked}." if asked else ""]
    if found.get("bytes_before") and found.get("bytes_after"):
        sizes = show.size(int(found["bytes_before"])), show.size(int(found["bytes_after"]))
        said.append(f"All weights of the model: {sizes[0]} before, {sizes[1]} after.")
    if found.get("calibration"):
        said.append(f"Calibrated with {found['calibration']}.")
    parts.append(paragraph(" ".join(part for part in said if part)))
    good = [e for e in tensors if _finite(e.get("error"))]
    if good:
        parts.append(paragraph("Relative L2 error of each weight matrix, or stack of experts, in the graph's order."))
        parts.append(_plot(good))
    if found.get("notes"):
        parts.append(items([text(note) for note in found["notes"]]))
    parts.append(_caches([entry for entry in found.get("caches") or () if isinstance(entry, Mapping)]))
    measured = any(_finite(e.get("product_error")) for e in tensors)
    rows = [
        [
            code(e.get("name", "")),
            text(f"{_kind(e)}{', calibrated' if e.get('calibrated') else ''}"),
            text(small(e.get("error"))),
            *([text(small(e["product_error"]) if _finite(e.get("product_error")) else "–")] if measured else []),
            *(text(show.size(int(e.get(side) or 0))) for side in ("bytes_before", "bytes_after")),
        ]
        for e in tensors[:2000]
    ]
    if rows:
        products = ["error of products"] if measured else []
        listed = table(["weights", "as", "error", *products, "before", "after"], rows, range(2, 5 + len(products)))
        parts.append(details(text(f"All {len(tensors)} one by one"), listed))
    return join(parts)


def _caches(entries: Sequence[Mapping[str, Any]]) -> Html:
    """The caches held in 8 bits: their old and new inputs and outputs, and bytes a token."""
    if not entries:
        return Html("")

    def ports(entry: Mapping[str, Any], side: str) -> Html:
        shown = [p for p in entry.get(side) or () if isinstance(p, Mapping)]
        return items(
            join([code(p.get("name", "")), text(f" {p.get('kind', '')}, {p.get('dtype', '')} {p.get('shape', '')}")])
            for p in shown
        )

    rows = [
        [
            code(e.get("node", "")),
            text(e.get("scheme", "")),
            ports(e, "before"),
            ports(e, "after"),
            text(f"{e.get('bytes_before', '')} → {e.get('bytes_after', '')}"),
            text(small(e["error"]) if _finite(e.get("error")) else "–"),
            code(e.get("calibrated") or "–"),
        ]
        for e in entries[:2000]
    ]
    said = "Caches of latents in 8 bits: inputs and outputs of the model changed. Bytes are those of a token and layer."
    headings = ["node", "as", "before", "after", "bytes", "error", "scales from"]
    return join([paragraph(said), table(headings, rows, (4, 5))])


def _kind(entry: Mapping[str, Any]) -> str:
    return " ".join(str(entry[key]) for key in ("group", "scheme") if entry.get(key))


def _finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _plot(entries: Sequence[Mapping[str, Any]]) -> Html:
    """Points over the tensors in order; errors on a logarithmic axis of whole decades."""
    kinds = list(dict.fromkeys(_kind(e) for e in entries))
    errors = [max(float(e["error"]), 1e-9) for e in entries]
    low, high = math.floor(math.log10(min(errors))), math.ceil(math.log10(max(errors)))
    high = max(high, low + 1)

    def y(error: float) -> float:
        return 8 + (HEIGHT - BOTTOM - 8) * (high - math.log10(error)) / (high - low)

    shapes = []
    for decade in range(low, high + 1):
        at = y(10.0**decade)
        shapes.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH}" y1="{at:.1f}" y2="{at:.1f}"></line>')
        shapes.append(f'<text x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">1e{decade}</text>')
    step = (WIDTH - LEFT - 16) / max(len(entries) - 1, 1)
    for i, (entry, error) in enumerate(zip(entries, errors, strict=True)):
        kind = kinds.index(_kind(entry)) % _KINDS
        title = text(f"{entry.get('name', '')}: {small(entry['error'])}")
        shapes.append(
            f'<circle class="k{kind}" cx="{LEFT + 8 + i * step:.1f}" cy="{y(error):.1f}" r="3">'
            f"<title>{title}</title></circle>"
        )
    shapes.append(f'<text x="{LEFT}" y="{HEIGHT - 6}">first</text>')
    shapes.append(f'<text x="{WIDTH - 4}" y="{HEIGHT - 6}" text-anchor="end">last</text>')
    drawing = (
        f'<svg class="plot" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="Relative error of each quantized tensor">{"".join(shapes)}</svg>'
    )
    legend = join(
        tag("span", join([tag("i", Html(""), class_=f"k{i % _KINDS}"), text(f" {kind or 'all'}")]))
        for i, kind in enumerate(kinds)
    )
    return join([Html(drawing), tag("p", legend, class_="legend")])


def times(bench: Mapping[str, Any]) -> Html:
    """What ``deltafuse bench --json`` measured: a table for each prompt length and one of single tokens."""
    variants = [v for v in bench.get("variants", []) if isinstance(v, Mapping)]
    timed = [(v, t) for v in variants for t in v.get("timings", []) if isinstance(t, Mapping)]
    parts = []
    for phase, tokens in dict.fromkeys((str(t.get("phase")), t.get("tokens")) for _, t in timed):
        chosen = [(v, t) for v, t in timed if (str(t.get("phase")), t.get("tokens")) == (phase, tokens)]
        chosen = [(v, t) for v, t in chosen if _finite(t.get("median_ms"))]
        if not chosen:
            continue
        slowest = max(t["median_ms"] for _, t in chosen)
        base = chosen[0][1]["median_ms"]
        rows = [
            [
                text(v.get("name", "")),
                text(v.get("device", "")),
                text(f"{t['median_ms']:.3g} ms"),
                bar(t["median_ms"] / slowest if slowest else 0, "time"),
                text(f"{base / t['median_ms']:.1f} ×" if t["median_ms"] else "–"),
                text(small(t.get("error")) + ("" if t.get("same", True) else ": differs")),
            ]
            for v, t in chosen
        ]
        parts.append(tag("h3", text(f"Prompt of {tokens} tokens" if phase == "prompt" else "One token")))
        parts.append(table(["", "device", "median", "", "faster", "error"], rows, (2, 4)))
    notes = [f"{v.get('name', '')}: not run: {v['failed']}" for v in variants if v.get("failed")]
    notes += [f"{v.get('name', '')}: {note}" for v in variants for note in v.get("notes", [])]
    parts += [paragraph(note, "note") for note in notes]
    if parts:
        parts.append(
            paragraph(f"Measured by deltafuse bench with ONNX Runtime {bench.get('onnxruntime', '')}.", "note")
        )
    return join(parts)


def placement(found: Iterable[tuple[str, Mapping[str, Any], Sequence[Mapping[str, Any]], str]]) -> Html:
    """Who runs what: for each session its name, nodes by execution provider, fused nodes, and a note."""
    rows, after = [], []
    for name, counts, fused, note in found:
        total = sum(int(count) for count in counts.values()) or 1
        for number_, (ep, count) in enumerate(sorted(counts.items(), key=lambda item: -int(item[1]))):
            who = ep or "no kernel: written out, or another op's"
            shown = "" if number_ else name
            rows.append([text(shown), text(who), number(int(count)), bar(int(count) / total, "now")])
        if fused:
            after.append(table(["fused node", "name", "runs on", "why not ours"], [_placed(node) for node in fused]))
        if note:
            after.append(paragraph(note, "note"))
    if not rows:
        return Html("")
    return join([table(["session", "execution provider", "nodes", ""], rows, (2,)), *after])


def _placed(node: Mapping[str, Any]) -> list[Html]:
    where = node.get("ep") or node.get("runs_as") or "inlined: its ONNX body"
    return [text(node.get("op_type", "")), code(node.get("name", "")), text(where), text(node.get("reason", ""))]
