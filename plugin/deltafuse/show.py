"""A ``FusionReport`` for people: tables that read well at 80 columns, with and without colours."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import IO, TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

if TYPE_CHECKING:
    from .fusions.result import FusionReport, QuantizationReport, RegionReport

_STATUS = {
    "fused": "[green]fused[/]",
    "fused-unproved": "[yellow]fused, not proved[/]",
    "recognised": "[cyan]recognised[/]",
    "refused": "[red]refused[/]",
}


def print_report(report: FusionReport, *, file: IO[str] | None = None, width: int | None = None) -> None:
    """Print a report to ``file`` (standard output) in ``width`` columns (the terminal's)."""
    render(report, console(file=file, width=width))


def console(*, file: IO[str] | None = None, width: int | None = None, stderr: bool = False) -> Console:
    """A console that highlights nothing by itself and writes 80 columns where it is no terminal."""
    out = Console(file=file, width=width, stderr=stderr, highlight=False, soft_wrap=False)
    if width is None and not out.is_terminal:
        out.width = 80
    return out


def render(report: FusionReport, out: Console) -> None:
    """Print a report: heading, regions, what was not fused and why, quantization, repairs, warnings, passes."""
    heading(report, out)
    _regions(report, out)
    _quantization(report, out)
    shown = {f"{region.name}: {note}" for region in report.regions for note in region.notes}
    _lines("Repaired", [repair for repair in report.repairs if repair not in shown], out)
    _lines("Warnings", report.warnings, out, style="yellow")
    _passes(report, out)


def heading(report: FusionReport, out: Console) -> None:
    """The first lines of a report: the model, what became of it, where it was written."""
    what = f"[bold]{escape(report.source or 'model')}[/]"
    if report.opsets:
        others = "".join(f", {escape(domain)} {version}" for domain, version in report.opsets.items() if domain)
        what += f" (opset {report.opsets.get('', 0)}{others}, IR {report.ir_version})"
    if report.dry_run:
        out.print(f"{what}: {report.nodes_before:,} nodes, nothing changed (dry run)")
    else:
        change = f"{report.nodes_before:,} nodes before, {report.nodes_after:,} after"
        out.print(f"{what}: {change}, target {report.target}, {seconds(report.seconds)}")
    if report.output:
        data = f" with {escape(report.output_data)} ({size(report.output_data_bytes)})" if report.output_data else ""
        out.print(f"written: [bold]{escape(report.output)}[/] ({size(report.output_bytes)}){data}")
    if not report.verify and not report.dry_run:
        out.print("[yellow]not verified: --no-verify, recorded in the model's metadata[/]")


def _regions(report: FusionReport, out: Console) -> None:
    had = ", ".join(f"{escape(op)}={count}" for op, count in report.already_fused.items())
    if had:
        out.print(f"fused already when it came: {had}")
    if not report.regions and had:
        out.print("\nNothing more in this model looks like a block that deltafuse knows.")
        return
    if not report.regions:
        out.print("\nNo region was recognised: nothing in this model looks like a block that deltafuse knows.")
        return
    groups = group_regions(report.regions)
    table = table_of()
    table.add_column("#", justify="right", no_wrap=True)
    table.add_column("op", no_wrap=True)
    table.add_column("where", overflow="fold", ratio=1)
    table.add_column("form", overflow="fold")
    table.add_column("nodes", justify="right", no_wrap=True)
    table.add_column("status")
    table.add_column("error / limit", no_wrap=True)
    for number, group in enumerate(groups, start=1):
        first = group[0]
        more = f" and {len(group) - 1} more like it" if len(group) > 1 else ""
        counts = sorted({region.nodes for region in group})
        nodes = f"{counts[0]:,}" if len(counts) == 1 else f"{counts[0]:,}-{counts[-1]:,}"
        status = _STATUS.get(first.status, escape(first.status))
        table.add_row(str(number), first.op, escape(first.name) + more, first.form, nodes, status, _error(group))
    out.print()
    out.print(table)
    out.print()
    for number, group in enumerate(groups, start=1):
        for label, lines in _details(group[0]):
            text = escape("; ".join(lines))
            out.print(Padding(f"{number} [bold]{label}:[/] {text}", (0, 0, 0, 2), expand=False))


def group_regions(regions: Sequence[RegionReport]) -> list[list[RegionReport]]:
    """Regions that differ in their names and sizes only, together, in order of their first."""
    groups: dict[object, list[RegionReport]] = {}
    for region in regions:
        reason = (region.refusal.code, region.refusal.reason) if region.refusal else None
        near = tuple((r.code, r.reason) for r in region.not_absorbed)
        proved = (region.proof.proved, region.proof.reason) if region.proof else None
        key = (region.op, region.form, region.status, reason, near, proved, (*region.absorbed,), (*region.notes,))
        groups.setdefault(key, []).append(region)
    return list(groups.values())


def _details(region: RegionReport) -> Iterable[tuple[str, list[str]]]:
    if region.refusal:
        yield "refused because", [str(region.refusal)]
    elif region.proof and not region.proof.proved and region.proof.reason:
        yield "proof", [region.proof.reason]
    if region.absorbed:
        yield "absorbed", [", ".join(region.absorbed)]
    if region.not_absorbed:
        yield "left outside", [str(refusal) for refusal in region.not_absorbed]
    if region.notes:
        yield "notes", region.notes


def _error(group: Sequence[RegionReport]) -> str:
    proofs = [region.proof for region in group if region.proof]
    errors = [proof.error for proof in proofs if math.isfinite(proof.error)]
    if not errors:
        return "not proved" if not any(p.proved for p in proofs) else "proved"
    limits = [proof.tolerance for proof in proofs if math.isfinite(proof.tolerance)]
    return f"{max(errors):.1e} / {min(limits):.0e}" if limits else f"{max(errors):.1e}"


def _quantization(report: FusionReport, out: Console) -> None:
    """A line for each group of weights that was asked for, what was left alone, and what all weights take."""
    done = report.quantization
    if done is None:
        return
    lines = []
    for group, scheme in done.schemes.items():
        tensors = [tensor for tensor in done.tensors if tensor.group == group]
        if tensors:
            named = f"{len(tensors):,} weight{'s' if len(tensors) > 1 else ''}"
            worst = max(tensors, key=lambda tensor: tensor.error)
            lines.append(f"{group} as {scheme}: {named}, relative error at most {worst.error:.1e} ({worst.name})")
    lines += cache_lines(done)
    lines.append(f"all weights: {size(done.bytes_before)} before, {size(done.bytes_after)} after")
    _lines("Quantized", lines + _first(done.notes), out)


def cache_lines(done: QuantizationReport) -> list[str]:
    """What became of each 8-bit cache: bytes, error, and the inputs and outputs in place of those before."""
    lines = []
    for cache in done.caches:
        error = "" if cache.error is None else f", relative error {cache.error:.1e}"
        zeros = f", {cache.unseen} channels that the calibration saw no number in" if cache.unseen else ""
        sizes = f"{cache.bytes_before:,} bytes a token became {cache.bytes_after:,}"
        lines.append(f"cache of {cache.node} as {cache.scheme}: {sizes}{error}{zeros}")
        for kind in ("input", "output"):
            old, new = (", ".join(p.text() for p in side if p.kind == kind) for side in (cache.before, cache.after))
            lines.append(f"  {kind}s {old} became {new}")
    return lines


def _passes(report: FusionReport, out: Console) -> None:
    passes = report.passes
    if not passes:
        return
    total = sum(p.seconds for p in passes)
    shown = [p for p in passes if p.changed or p.refused or p.notes or p.seconds > 0.05 * total]
    table = table_of()
    table.add_column("pass", overflow="fold", ratio=1)
    table.add_column("matched", justify="right")
    table.add_column("refused", justify="right")
    table.add_column("time", justify="right", no_wrap=True)
    for p in shown:
        counts = [f"{count:,}" if count else "" for count in (p.matched, len(p.refused))]
        table.add_row(escape(p.name), *counts, seconds(p.seconds))
    rest = len(passes) - len(shown)
    if rest:
        other = f"{rest} other{'s' if rest > 1 else ''} that changed nothing"
        table.add_row(other, "", "", seconds(total - sum(p.seconds for p in shown)))
    out.print()
    out.print(table)
    said = {(region.refusal.code, region.refusal.reason) for region in report.regions if region.refusal}
    reasons = [
        f"{p.name}: {refusal}" for p in shown for refusal in p.refused if (refusal.code, refusal.reason) not in said
    ]
    _lines("Left alone by passes", _first(reasons), out)
    elsewhere = ("repair", "quantize", "infer-types")  # shown above, or of no use to who reads a terminal
    notes = [f"{p.name}: {note}" for p in passes if not p.name.startswith(elsewhere) for note in p.notes]
    _lines("Notes of passes", _first(notes), out)


def _first(lines: Sequence[str], most: int = 10) -> list[str]:
    more = len(lines) - most
    return [*lines[:most], *([f"and {more} more"] if more > 0 else [])]


def _lines(title: str, lines: Sequence[str], out: Console, style: str = "") -> None:
    if not lines:
        return
    out.print(f"\n[bold]{title}[/]")
    for line in lines:
        out.print(Padding(escape(line), (0, 0, 0, 2), expand=False), style=style or None)


def table_of() -> Table:
    """An empty table in the style of all tables here: a rule under the heading, two spaces between columns."""
    return Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))


def seconds(value: float) -> str:
    """A time for people: 12 ms, 3.4 s, 125 s."""
    if value < 0.0995:
        return f"{value * 1e3:.1f} ms" if value < 0.00995 else f"{value * 1e3:.0f} ms"
    return f"{value:.1f} s" if value < 99.5 else f"{value:,.0f} s"


def size(count: int) -> str:
    """A number of bytes for people: 812 B, 4.0 MiB, 2.1 GiB."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            break
        value /= 1024
    return f"{count} B" if unit == "B" else f"{value:,.1f} {unit}"
