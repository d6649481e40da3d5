"""The regions: what each became, why it can be trusted, what was taken in and what was not."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from . import show
from .report_html_parts import (
    Html,
    bar,
    code,
    details,
    items,
    join,
    number,
    pairs,
    paragraph,
    small,
    span,
    table,
    tag,
    text,
)
from .report_html_picture import Picture, call_of

if TYPE_CHECKING:
    from .fusions.result import FusionReport, ProofReport, RegionReport

#: Nodes of one region, and regions of one group, that are listed.
MOST_NODES = 1500
MOST_NAMES = 200

STATUS = {
    "fused": "fused, proved",
    "fused-unproved": "fused, not proved",
    "recognised": "recognised",
    "refused": "refused",
}


def group(regions: Sequence[RegionReport]) -> tuple[list[list[int]], list[int]]:
    """Regions that say the same of themselves, together.

    Returns:
        The indices of each group's regions, in order of their first, and for each region the number of its group.
    """
    numbers: dict[object, int] = {}
    group_of = []
    for region in regions:
        proof = region.proof
        key = (
            (region.op, region.form, region.status, str(sorted(region.config.items())), *region.absorbed),
            (region.refusal.code, region.refusal.reason) if region.refusal else None,
            tuple((r.code, r.reason) for r in region.not_absorbed),
            (proof.proved, proof.structure, proof.reason) if proof else None,
            tuple(region.notes),
        )
        group_of.append(numbers.setdefault(key, len(numbers)))
    groups: list[list[int]] = [[] for _ in numbers]
    for index, found in enumerate(group_of):
        groups[found].append(index)
    return groups, group_of


def regions(report: FusionReport, shown: Picture, groups: Iterable[list[int]]) -> Html:
    """One part to open for each group."""
    in_file = {block.region: block.before for block in shown.blocks if block.region is not None}
    return join(_group(report, number, indices, in_file) for number, indices in enumerate(groups, start=1))


def _group(report: FusionReport, number_: int, indices: list[int], in_file: dict[int, int]) -> Html:
    found = [report.regions[i] for i in indices]
    first = found[0]
    many = f"{len(found)} regions" if len(found) > 1 else first.name
    op = call_of(first).rpartition(":")[2]
    errors = [r.proof.error for r in found if r.proof and math.isfinite(r.proof.error)]
    parts = [
        tag("b", text(op)),
        tag("span", text(many), class_="where"),
        tag("span", text(STATUS.get(first.status, first.status)), class_=f"status {first.status}"),
    ]
    if errors and first.status != "refused":
        limit = first.proof.tolerance if first.proof else math.nan
        parts.append(tag("span", text(f"error {small(max(errors))}, limit {small(limit)}"), class_="error"))
    inner = join(
        [
            _reason(first),
            _where(found, indices, in_file),
            _neighbours(first),
            _notes(first),
            _proof(first.proof),
            _config(first),
            _nodes(first),
        ]
    )
    return details(join(parts, " "), inner, id=f"group-{number_}", class_="region")


def _reason(region: RegionReport) -> Html:
    if region.refusal is not None:
        where = join([text(" (node "), code(region.refusal.node), text(")")]) if region.refusal.node else Html("")
        why = join([tag("b", text("Left as it was: ")), text(region.refusal.reason), where])
        return tag("p", why, class_="why")
    return Html("")


def _where(found: list[RegionReport], indices: list[int], in_file: dict[int, int]) -> Html:
    rows = [
        [
            code(region.name),
            number(in_file[i]) if i in in_file else text("–"),
            number(max(region.nodes, len(region.members))),
            text(small(region.proof.error) if region.proof else "–"),
            text(_shared(region.proof)),
        ]
        for i, region in list(zip(indices, found, strict=True))[:MOST_NAMES]
    ]
    listed = table(["where", "nodes in the file", "after clean-up", "error", "proof"], rows, (1, 2, 3))
    if len(found) > MOST_NAMES:
        listed = join([listed, paragraph(f"and {len(found) - MOST_NAMES} more", "note")])
    if len(found) > 6:
        sizes = [max(region.nodes, len(region.members)) for region in found]
        heading = text(f"All {len(found)} places, {span(min(sizes), max(sizes))} nodes each")
        return details(heading, listed)
    return listed


def _shared(proof: ProofReport | None) -> str:
    if proof is None:
        return "none"
    if proof.reused:
        return "shared: same structure"
    return f"{'proved' if proof.proved else 'not proved'} in {show.seconds(proof.seconds)}"


def _neighbours(region: RegionReport) -> Html:
    parts = []
    if region.absorbed:
        parts.append(tag("p", join([tag("b", text("Taken in: ")), text(", ".join(region.absorbed))])))
    if region.not_absorbed:
        rows = [
            [
                text(refusal.code),
                join([text(refusal.reason), join([text(", at "), code(refusal.node)]) if refusal.node else Html("")]),
            ]
            for refusal in region.not_absorbed
        ]
        parts.append(table(["left outside", "why"], rows))
    return join([tag("h3", text("Neighbours")), *parts]) if parts else Html("")


def _notes(region: RegionReport) -> Html:
    return items([text(note) for note in region.notes], "notes") if region.notes else Html("")


def _proof(proof: ProofReport | None) -> Html:
    if proof is None:
        return paragraph("Not proved: the rewrite rests on the recogniser's word.", "note")
    said = [
        f"Region and replacement were run side by side in float32 on the CPU, seed {proof.seed}, "
        f"{len(proof.cases)} cases; relative L2 error of each output, limit {small(proof.tolerance)}."
    ]
    if proof.heads:
        said.append(f"Run on heads {', '.join(map(str, proof.heads))}: the region treats all heads alike.")
    if proof.reason:
        said.append(proof.reason if proof.reason.endswith(".") else proof.reason + ".")
    parts = [tag("h3", text("Proof")), paragraph(" ".join(said))]
    if proof.cases:
        parts.append(_cases(proof))
    if proof.structure:
        parts.append(tag("p", join([text("Structure "), code(proof.structure)]), class_="note"))
    return join(parts)


def _cases(proof: ProofReport) -> Html:
    known = ("case", "errors", "error", "seed")
    sizes = list(dict.fromkeys(k for c in proof.cases for k, v in c.items() if k not in known and isinstance(v, int)))
    rows = []
    for case in proof.cases:
        errors = [e for e in case.get("errors", []) if isinstance(e, (int, float))]
        worst = max(errors, default=None, key=lambda e: e if math.isfinite(e) else math.inf)
        remarks = [f"{k}: {v}" for k, v in case.items() if k not in known and not isinstance(v, int)]
        rows.append(
            [
                text(case.get("case", "")),
                *(text(case.get(size, "")) for size in sizes),
                text(small(worst)),
                bar(_decades(worst, proof.tolerance), "error"),
                text(", ".join(small(e) for e in errors)),
                text("; ".join(remarks)),
            ]
        )
    headings = ["case", *sizes, "worst error", "", "by output", "remark"]
    if not any(row[-1] for row in rows):
        headings, rows = headings[:-1], [row[:-1] for row in rows]
    legend = "The bar is the worst error's place between 1e-9 and the limit, in decades."
    return join([table(headings, rows, range(1, len(sizes) + 2)), paragraph(legend, "note")])


def _decades(error: Any, limit: float) -> float:
    if not isinstance(error, (int, float)) or not error or not limit > 1e-9:
        return 0.0
    return (math.log10(max(error, 1e-9)) + 9) / (math.log10(limit) + 9) if math.isfinite(error) else 1.0


def _config(region: RegionReport) -> Html:
    if not region.config:
        return Html("")
    rows = ((name, text(value)) for name, value in region.config.items())
    return details(text("Configuration"), tag("div", pairs(rows, grouped=True), class_="config"))


def _nodes(region: RegionReport) -> Html:
    if not region.members:
        return Html("")
    counts = Counter(op for op, _, _ in region.members).most_common()
    listed = [join([tag("b", text(op)), text(" "), code(name)]) for op, name, _ in region.members[:MOST_NODES]]
    parts = [
        paragraph(", ".join(f"{op} {count}" for op, count in counts)),
        tag("div", items(listed), class_="nodes", tabindex=0),
    ]
    if len(region.members) > MOST_NODES:
        parts.append(paragraph(f"and {len(region.members) - MOST_NODES:,} more", "note"))
    return details(text(f"Its nodes ({len(region.members):,})"), join(parts))


def left_alone(report: FusionReport) -> Html:
    """What passes refused beyond the regions, each reason once with how often."""
    said = {(r.refusal.code, r.refusal.reason) for r in report.regions if r.refusal}
    counts: Counter[tuple[str, str]] = Counter()
    example: dict[tuple[str, str], str] = {}
    for found in report.passes:
        for refusal in found.refused:
            if (refusal.code, refusal.reason) not in said:
                counts[found.name, refusal.reason] += 1
                example.setdefault((found.name, refusal.reason), refusal.node)
    rows = [
        [text(name), text(reason), code(example[name, reason]) if example[name, reason] else Html(""), number(count)]
        for (name, reason), count in counts.most_common(100)
    ]
    return table(["pass", "why", "for example", "times"], rows, (3,)) if rows else Html("")


def near_misses(report: FusionReport, groups: Iterable[list[int]]) -> Html:
    """The candidates that were refused, with a link to each."""
    rows = []
    for number_, indices in enumerate(groups, start=1):
        region = report.regions[indices[0]]
        if region.status == "refused":
            op = call_of(region).rpartition(":")[2]
            reason = region.refusal.reason if region.refusal else (region.proof.reason if region.proof else "")
            link = tag("a", text(op), href=f"#group-{number_}")
            more = f" and {len(indices) - 1} more" if len(indices) > 1 else ""
            rows.append([link, join([code(region.name), text(more)]), text(reason)])
    return table(["looks like", "where", "why not"], rows) if rows else Html("")


def repairs(report: FusionReport) -> Html:
    """What was mended; of regions that say the same, how many there are."""
    counts: Counter[str] = Counter()
    first: dict[str, str] = {}
    for said in report.repairs:
        name = next((region.name for region in report.regions if said.startswith(f"{region.name}: ")), "")
        rest = said[len(name) + 2 :] if name else said
        counts[rest] += 1
        first.setdefault(rest, name)
    rows = []
    for said, count in counts.items():
        where = join([code(first[said]), text(f" and {count - 1} more like it" if count > 1 else "")])
        rows.append(join([where, text(": "), text(said)]) if first[said] else text(said))
    return items(rows) if rows else Html("")
