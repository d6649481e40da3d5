"""The commands that run models: ``verify``, ``bench``, ``run``, ``calibrate``."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from . import show
from .cli_common import (
    EXIT_NO,
    Json,
    Quiet,
    check_file_name,
    clear_errors,
    own_output,
    parse_dims,
    parse_numbers,
    print_json,
    progress_bar,
)
from .errors import OptionError, OutputError

if TYPE_CHECKING:
    from .bench import BenchReport
    from .calibration import Calibration
    from .compare import Comparison

Model = Annotated[Path, typer.Argument(metavar="MODEL.onnx", help="The model.", show_default=False)]
Device = Annotated[str, typer.Option(metavar="auto|cpu|cuda[:N]", help="Where to run.")]
Plugin = Annotated[bool, typer.Option("--plugin/--no-plugin", help="Run fused nodes on the plugin's kernels.")]
Batch = Annotated[int, typer.Option(min=1, metavar="N", help="Sequences, where the model leaves that open.")]
Seed = Annotated[int, typer.Option(min=0, metavar="N", help="Seed of the random numbers.")]
Dims = Annotated[
    list[str] | None,
    typer.Option("--dim", metavar="NAME=N", help="Size of a symbolic dimension. Repeatable.", show_default=False),
]
Vocabulary = Annotated[
    int | None,
    typer.Option(min=1, metavar="N", help="Token ids are below N, where the model does not tell.", show_default=False),
]
Lengths = Annotated[str, typer.Option(metavar="N[,N...]", help="Lengths of prompts, where the model leaves that open.")]
Steps = Annotated[int, typer.Option(min=0, metavar="N", help="Steps after the prompt, where states are carried.")]
Past = Annotated[int, typer.Option(min=0, metavar="N", help="Positions in random states, where that is open.")]
Tolerance = Annotated[
    float | None,
    typer.Option(min=0.0, metavar="X", help="Largest relative L2 error. Default: by type.", show_default=False),
]
InputFile = Annotated[
    Path | None,
    typer.Option("--input", "-i", metavar="DATA.npz", help="Inputs by name; others are made.", show_default=False),
]


def verify_command(
    first: Annotated[Path, typer.Argument(metavar="A.onnx", help="The model that is right.", show_default=False)],
    second: Annotated[Path, typer.Argument(metavar="B.onnx", help="The model to check.", show_default=False)],
    input_file: InputFile = None,
    tokens: Lengths = "16",
    steps: Steps = 4,
    past: Past = 8,
    samples: Annotated[int, typer.Option(min=1, metavar="N", help="Times, each with other random numbers.")] = 1,
    tolerance: Tolerance = None,
    device: Device = "auto",
    plugin: Plugin = True,
    batch: Batch = 1,
    seed: Seed = 0,
    dim: Dims = None,
    vocabulary: Vocabulary = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Do two models give the same? A prompt and tokens after it, each model with its own states.

    Exit codes: 0 they do, 1 they do not, 2 bad input or usage.
    """
    with clear_errors(as_json):
        from .compare import compare
        from .sample_inputs import load_inputs

        with progress_bar(quiet or as_json) as progress:
            done = compare(
                first,
                second,
                tokens=parse_numbers(tokens, "--tokens"),
                steps=steps,
                past=past,
                batch=batch,
                samples=samples,
                seed=seed,
                tolerance=tolerance,
                dims=parse_dims(dim),
                vocabulary=vocabulary,
                given=load_inputs(input_file) if input_file is not None else None,
                device=device,
                plugin=plugin,
                progress=progress,
            )
        if all(case.failed == "both" for case in done.cases):
            raise OptionError(f"neither model runs on these inputs: {done.cases[0].reason}")
        with own_output():
            if as_json:
                print_json(done.to_dict())
            elif not quiet and sys.stdout is not None:
                _render_comparison(done, show.console())
        if not done.same:
            raise typer.Exit(EXIT_NO)


def bench_command(
    model: Model,
    tokens: Lengths = "64",
    steps: Steps = 16,
    target: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Fuse for this target. Repeatable; default: all.", show_default=False),
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, metavar="N", help="Runs of a prompt, at most.")] = 20,
    verify: Annotated[bool, typer.Option("--verify/--no-verify", help="Prove the rewrites, as fuse does.")] = True,
    tolerance: Tolerance = None,
    device: Device = "auto",
    batch: Batch = 1,
    seed: Seed = 0,
    dim: Dims = None,
    vocabulary: Vocabulary = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Time prompts and single tokens of a model as it is and fused, after its numbers were checked.

    Exit codes: 0 all give the same numbers, 1 one does not, 2 bad input or usage.
    """
    with clear_errors(as_json):
        from .bench import bench

        with progress_bar(quiet or as_json) as progress:
            done = bench(
                model,
                tokens=parse_numbers(tokens, "--tokens"),
                steps=steps,
                batch=batch,
                repeats=repeats,
                targets=target or None,
                device=device,
                verify=verify,
                tolerance=tolerance,
                seed=seed,
                dims=parse_dims(dim),
                vocabulary=vocabulary,
                progress=progress,
            )
        with own_output():
            if as_json:
                print_json(done.to_dict())
            elif not quiet and sys.stdout is not None:
                _render_bench(done, show.console())
        if not done.same:
            raise typer.Exit(EXIT_NO)


def run_command(
    model: Model,
    tokens: Annotated[
        str | None,
        typer.Option(metavar="ID[,ID...]", help="The prompt's token ids. Random ones by default.", show_default=False),
    ] = None,
    input_file: InputFile = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="OUT.npz", help="Write the outputs there.", show_default=False),
    ] = None,
    device: Device = "auto",
    plugin: Plugin = True,
    batch: Batch = 1,
    seed: Seed = 0,
    dim: Dims = None,
    vocabulary: Vocabulary = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Run a model once and say what came out: for each output its type, shape and range, and what ran where."""
    check_file_name(output, "--output", "--json prints the summary on standard output")
    with clear_errors(as_json):
        from .run import run_model, save_outputs
        from .sample_inputs import load_inputs

        outputs, found = run_model(
            model,
            token_ids=parse_numbers(tokens, "--tokens") if tokens is not None else None,
            given=load_inputs(input_file) if input_file is not None else None,
            device=device,
            plugin=plugin,
            batch=batch,
            seed=seed,
            dims=parse_dims(dim),
            vocabulary=vocabulary,
        )
        if output is not None:
            save_outputs(output, outputs)
            found["output"] = str(output)
        with own_output(f"{output} was written" if output is not None else ""):
            if as_json:
                print_json(found)
            elif not quiet and sys.stdout is not None:
                _render_run(found, show.console())


def calibrate_command(
    model: Model,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="STATS.npz", help="Where to write them.", show_default=False)
    ],
    input_files: Annotated[
        list[Path] | None,
        typer.Option("--input", "-i", metavar="DATA.npz", help="Sample inputs. Repeatable.", show_default=False),
    ] = None,
    tokens: Annotated[
        list[str] | None,
        typer.Option(metavar="ID[,ID...]", help="A prompt's token ids. Repeatable.", show_default=False),
    ] = None,
    samples: Annotated[int, typer.Option(min=1, metavar="N", help="Random prompts, where none are given.")] = 8,
    length: Annotated[int, typer.Option(min=1, metavar="N", help="Tokens of a random prompt.")] = 64,
    steps: Steps = 4,
    device: Device = "auto",
    batch: Batch = 1,
    seed: Seed = 0,
    dim: Dims = None,
    vocabulary: Vocabulary = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Write the statistics of a model's activations on sample inputs, for quantization.

    For the inputs of every product with a weight, and for every state that is carried: the largest absolute value and
    the mean square of each channel.
    """
    check_file_name(output, "--output", "--json prints the summary on standard output")
    with clear_errors(as_json):
        from .calibration import calibrate
        from .model_save import check_target
        from .sample_inputs import load_inputs

        check_target(output)
        for file in input_files or []:
            if file.exists() and output.exists() and file.samefile(output):
                raise OutputError(f"{output} is an input: write the statistics to another file")
        with progress_bar(quiet or as_json) as progress:
            done = calibrate(
                model,
                given=[load_inputs(file) for file in input_files or []],
                token_ids=[parse_numbers(text, "--tokens") for text in tokens or []],
                samples=samples,
                tokens=length,
                steps=steps,
                batch=batch,
                seed=seed,
                dims=parse_dims(dim),
                vocabulary=vocabulary,
                device=device,
                progress=progress,
            )
        done.save(output)
        with own_output(f"{output} was written"):
            if as_json:
                print_json(_calibration_summary(done, output))
            elif not quiet and sys.stdout is not None:
                _render_calibration(done, output, show.console())


def add_to(app: typer.Typer) -> None:
    """Make them commands of ``deltafuse``."""
    app.command("verify")(verify_command)
    app.command("bench")(bench_command)
    app.command("run")(run_command)
    app.command("calibrate")(calibrate_command)


# -- what people read -------------------------------------------------------------------------------------------------


def _render_comparison(done: Comparison, out: Console) -> None:
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


def _render_bench(done: BenchReport, out: Console) -> None:
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


def _render_run(found: dict[str, Any], out: Console) -> None:
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
    nodes = ", ".join(f"{count} nodes on {ep or 'no kernel (inlined)'}" for ep, count in found["nodes"].items())
    out.print(f"{steps} on {found['device']}, {found['milliseconds']:.1f} ms; {nodes}")
    if found["note"]:
        out.print(escape(found["note"]), soft_wrap=True)


def _calibration_summary(done: Calibration, output: Path) -> dict[str, Any]:
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


def _render_calibration(done: Calibration, output: Path, out: Console) -> None:
    kinds = [kind for entry in done.tensors.values() for kind in entry.kinds]
    out.print(
        f"{kinds.count('weight')} inputs of products with weights and {kinds.count('cache')} states, "
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
