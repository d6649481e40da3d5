"""What the commands that run models print for people."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape

from . import show

if TYPE_CHECKING:
    from .bench import BenchReport
    from .calibration import Calibration
    from .compare import Comparison


def comparison(done: Comparison, out: Console) -> None:
    """What ``verify`` found, case by case."""
    colours = {"same": "green", "repaired": "cyan", "not run": "yellow"}
    for case in done.cases:
        colour = colours.get(case.status, "red")
        past = f", {case.past} positions before" if case.past else ""
        out.print(f"[bold]{escape(case.name)}[/]{past}: [{colour}]{case.status}[/]")
        if case.failed:
            who = {"first": "only the first model fails", "second": "only the second model fails"}
            out.print(f"  {who.get(case.failed, 'both models fail')}: {escape(case.reason)}", soft_wrap=True)
            continue
        table = show.table_of()
        for name in ("phase", "output"):
            table.add_column(name, overflow="fold")
        for name in ("steps", "error", "limit", "largest difference"):
            table.add_column(name, justify="right", no_wrap=True)
        for check in _shortened(case.outputs):
            error = f"{check.error:.1e}" if check.same else f"[red]{check.error:.1e}[/]"
            name = escape(check.output) + (" (state)" if check.state else "")
            table.add_row(check.phase, name, str(check.steps), error, f"{check.limit:.0e}", f"{check.max_abs:.1e}")
        out.print(table)
        hidden = len(case.outputs) - len(_shortened(case.outputs))
        if hidden:
            out.print(f"  and {hidden} states with smaller errors")
    if done.own_states[0]:
        first, second = (", ".join(map(escape, names)) for names in done.own_states)
        out.print(f"states that only one model has, or in this type: {first}; {second}: empty at first, not compared")
    for note in done.notes:
        out.print(escape(note), soft_wrap=True)
    text = "the same" if done.same else "NOT the same"
    colour = "green" if done.same else "red"
    out.print(f"[bold {colour}]{text}[/]: worst relative error {done.error:.1e}, seed {done.seed}")


def _shortened(outputs: Iterable[Any]) -> list[Any]:
    """All outputs but the states, those states that differ, and of the others the worst of each phase."""
    outputs = list(outputs)
    worst: dict[str, Any] = {}
    for check in outputs:
        if check.state and (check.phase not in worst or check.error > worst[check.phase].error):
            worst[check.phase] = check
    return [check for check in outputs if not check.state or not check.same or check is worst[check.phase]]


def bench(done: BenchReport, out: Console) -> None:
    """A table for each prompt length, and one of single tokens."""
    fused = ", ".join(f"{count} {op}" for op, count in done.fused.items()) or "nothing new"
    out.print(f"[bold]{escape(done.model)}[/]: {fused} fused; ONNX Runtime {done.onnxruntime}")
    rows = {(timing.phase, timing.tokens): None for variant in done.variants for timing in variant.timings}
    base = {(t.phase, t.tokens): t.median_ms for v in done.variants[:1] for t in v.timings}
    for phase, tokens in rows:
        table = show.table_of()
        table.add_column(f"prompt of {tokens} tokens" if phase == "prompt" else "one token", overflow="fold", ratio=1)
        for name in ("device", "median", "least", "tokens/s", "faster", "error"):
            table.add_column(name, justify="right", no_wrap=True)
        for variant in done.variants:
            for timing in variant.timings:
                if (timing.phase, timing.tokens) != (phase, tokens):
                    continue
                before = base.get((phase, tokens))
                faster = f"{before / timing.median_ms:.1f}x" if before and timing.median_ms else ""
                error = f"{timing.error:.0e}" if timing.same else f"[red]{timing.error:.0e}[/]"
                times = [f"{timing.median_ms:.3g} ms", f"{timing.least_ms:.3g} ms", f"{timing.tokens_per_second:,.0f}"]
                table.add_row(escape(variant.name), variant.device, *times, faster, error)
        out.print(table)
    for variant in done.variants:
        for note in ([f"not run: {variant.failed}"] if variant.failed else []) + variant.notes:
            out.print(f"{escape(variant.name)}: {escape(note)}", soft_wrap=True)
    if not done.same:
        out.print("[bold red]the numbers differ: the times mean nothing[/]")


def run(found: dict[str, Any], out: Console) -> None:
    """The outputs of a run, and what ran where."""
    table = show.table_of()
    table.add_column("output", overflow="fold", ratio=1)
    table.add_column("type", no_wrap=True)
    table.add_column("shape", no_wrap=True)
    for name in ("min", "max", "mean"):
        table.add_column(name, justify="right", no_wrap=True)
    for entry in found["outputs"]:
        numbers = [f"{entry[name]:.4g}" if name in entry else "" for name in ("min", "max", "mean")]
        shape = escape(str(entry["shape"]).replace(" ", ""))
        table.add_row(escape(entry["name"]), entry["dtype"], shape, *numbers)
    out.print(table)
    if found["next_tokens"]:
        out.print(f"most likely next tokens: {', '.join(map(str, found['next_tokens']))}")
    steps = f"{found['steps']} step{'s' if found['steps'] > 1 else ''}"
    nodes = ", ".join(
        f"{count} node{'' if count == 1 else 's'} on {ep or 'no kernel (inlined)'}"
        for ep, count in found["nodes"].items()
    )
    out.print(f"{steps} on {found['device']}, {found['milliseconds']:.1f} ms; {nodes}")
    if found["note"]:
        out.print(escape(found["note"]), soft_wrap=True)


def calibration_summary(done: Calibration, output: Path) -> dict[str, Any]:
    """What ``calibrate --json`` prints: a line for each value, without the channels."""
    tensors = [
        {
            "name": entry.name,
            "kinds": entry.kinds,
            "channels": len(entry.amax),
            "rows": entry.rows,
            "amax": entry.tensor_amax,
            "rms": float(entry.mean_square.mean()) ** 0.5,
        }
        for entry in done.tensors.values()
    ]
    summary = {"output": str(output), "model": done.model, "sequences": done.sequences, "tokens": done.tokens}
    return summary | {"seed": done.seed, "tensors": tensors, "skipped": done.skipped}


def calibration(done: Calibration, output: Path, out: Console) -> None:
    """What was looked at, and the largest values."""
    kinds = [kind for entry in done.tensors.values() for kind in entry.kinds]
    latents = f", {kinds.count('latent')} latents that are cached" if "latent" in kinds else ""
    out.print(
        f"{kinds.count('weight')} inputs of products with weights and {kinds.count('cache')} states{latents}, "
        f"{done.tokens:,} tokens in {done.sequences} sequences"
    )
    table = show.table_of()
    table.add_column("largest values", overflow="fold", ratio=1)
    for name in ("channels", "amax", "amax / rms"):
        table.add_column(name, justify="right", no_wrap=True)
    for entry in sorted(done.tensors.values(), key=lambda found: -found.tensor_amax)[:8]:
        rms = float(entry.mean_square.mean()) ** 0.5
        ratio = f"{entry.tensor_amax / rms:.1f}" if rms else ""
        table.add_row(escape(entry.name), str(len(entry.amax)), f"{entry.tensor_amax:.3g}", ratio)
    out.print(table)
    if done.skipped:
        out.print(f"never held a number: {escape(', '.join(done.skipped[:5]))}", soft_wrap=True)
    out.print(f"written: [bold]{escape(str(output))}[/]")
