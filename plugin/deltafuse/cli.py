"""The ``deltafuse`` command."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from . import __version__, cli_models, show
from .cli_common import (
    EXIT_INPUT,
    EXIT_REQUIRED,
    Json,
    Quiet,
    check_file_name,
    clear_errors,
    own_output,
    parse_names,
    parse_require,
    print_json,
    progress_bar,
)
from .errors import OutputError, RequirementError

app = typer.Typer(
    name="deltafuse",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Model = Annotated[Path, typer.Argument(metavar="IN.onnx", help="The model. It is not changed.", show_default=False)]
Report = Annotated[
    Path | None,
    typer.Option(
        "--report", metavar="FILE", help="Write the full report here: a page (.html) or JSON.", show_default=False
    ),
]
Times = Annotated[
    list[Path] | None,
    typer.Option(
        "--times",
        metavar="FILE.json",
        help="For a report .html: what `bench --json` or `run --json` printed. Repeatable.",
        show_default=False,
    ),
]
Fusions = Annotated[
    str | None,
    typer.Option(metavar="KEY[,KEY...]", help="Fusions to look for. Default: all that there are.", show_default=False),
]
Memory = Annotated[
    str | None,
    typer.Option("--proof-memory", metavar="SIZE", help="Most memory for one proof, such as 8GiB. Default 4GiB."),
]
Seconds = Annotated[
    float | None, typer.Option("--proof-seconds", metavar="S", help="Most time for one proof. Default 60.")
]

Quantize = Annotated[
    str | None,
    typer.Option(
        "--quantize",
        metavar="GROUP=FORMAT,...",
        help="How to store weights: experts=int4:128,dense=int8:128 (or int8:channel, fp8:128x128, bf16); caches of "
        "latents: cache=int8 or cache=fp8:128.",
        show_default=False,
    ),
]
CalibrationFile = Annotated[
    Path | None,
    typer.Option(
        "--calibration",
        metavar="DATA.npz",
        help="What `deltafuse calibrate` wrote of this model: --quantize chooses scales with it.",
        show_default=False,
    ),
]
Algorithm = Annotated[
    str,
    typer.Option(
        metavar="auto|nearest|aware|gptq",
        help="How --quantize rounds: auto is the best that --calibration has what for; gptq needs its rows.",
    ),
]


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and leave.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Find the blocks of hybrid linear-attention models in an ONNX model, prove each, and fuse it into one node."""


@app.command("fuse")
def fuse_command(
    model: Model,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="OUT.onnx", help="Where to write the fused model.", show_default=False),
    ] = None,
    target: Annotated[
        str, typer.Option(metavar="plugin|portable", help="Calls of deltafuse functions, or standard ONNX ops only.")
    ] = "plugin",
    fusions: Fusions = None,
    verify: Annotated[
        bool,
        typer.Option("--verify/--no-verify", help="Prove every rewrite against the original before it is applied."),
    ] = True,
    require: Annotated[
        list[str] | None,
        typer.Option(
            metavar="OP=N", help="Exit with 1 and write no model unless N are fused. Repeatable.", show_default=False
        ),
    ] = None,
    report: Report = None,
    times: Times = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Report what would be fused; write no model.")] = False,
    proof_memory: Memory = None,
    proof_seconds: Seconds = None,
    quantize: Quantize = None,
    calibration: CalibrationFile = None,
    algorithm: Algorithm = "auto",
    latent_cache: Annotated[
        bool,
        typer.Option(
            "--latent-cache", help="Caches of keys and values become caches of latents: other inputs and outputs."
        ),
    ] = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Fuse IN.onnx and write OUT.onnx.

    Exit codes: 0 done, 1 fewer fused than --require asks for, 2 bad input or usage.
    """
    if output is None and not dry_run:
        raise typer.BadParameter("give -o OUT.onnx, or --dry-run to only look", param_hint="--output")
    check_file_name(output, "--output", "models are not written to standard output: give a file's name")
    check_file_name(report, "--report", "--json prints the report on standard output")
    wanted = parse_require(require or [])
    with clear_errors(as_json):
        from .api import fuse

        _run(
            lambda progress: fuse(
                model,
                output,
                target=target,
                fusions=parse_names(fusions),
                verify=verify,
                require=wanted,
                report=report,
                times=times or (),
                dry_run=dry_run,
                progress=progress,
                proof_memory=proof_memory,
                proof_seconds=proof_seconds,
                quantize=quantize,
                calibration=calibration,
                algorithm=algorithm,
                latent_cache=latent_cache,
            ),
            quiet,
            as_json,
        )


@app.command("inspect")
def inspect_command(
    model: Model,
    verify: Annotated[bool, typer.Option("--verify/--no-verify", help="Also prove what is recognised.")] = False,
    target: Annotated[str, typer.Option(metavar="plugin|portable", help="As for fuse.")] = "plugin",
    fusions: Fusions = None,
    report: Report = None,
    times: Times = None,
    proof_memory: Memory = None,
    proof_seconds: Seconds = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Say what is recognised in IN.onnx, what nearly is, and why not. Writes no model."""
    check_file_name(report, "--report", "--json prints the report on standard output")
    with clear_errors(as_json):
        from .api import inspect

        _run(
            lambda progress: inspect(
                model,
                verify=verify,
                target=target,
                fusions=parse_names(fusions),
                report=report,
                times=times or (),
                progress=progress,
                proof_memory=proof_memory,
                proof_seconds=proof_seconds,
            ),
            quiet,
            as_json,
        )


cli_models.add_to(app)


@app.command("doctor")
def doctor_command(quiet: Quiet = False, as_json: Json = False) -> None:
    """Say what is installed, whether the plugin loads here, what can run on it, and what to do next.

    Exit codes: 0 a fused model runs on the plugin's kernels here, 1 it does not (only by fallback, or not at all).
    """
    with clear_errors(as_json):
        from .cli_doctor import examine, render

        findings = examine()
        with own_output():
            if as_json:
                print_json(findings)
            elif not quiet:
                render(findings, show.console())
        if findings["verdict"]["exit_code"]:
            raise typer.Exit(findings["verdict"]["exit_code"])


@app.command("olive-config")
def olive_config_command(
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE.json",
            help="Where to write it. Default: your cache folder.",
            show_default=False,
        ),
    ] = None,
    base: Annotated[
        Path | None,
        typer.Option("--base", metavar="FILE.json", help="A package config to add besides.", show_default=False),
    ] = None,
    as_json: Json = False,
) -> None:
    """Write Olive's package config with the pass DeltaFuse, and print the file's path.

    olive run --config my.json --package-config "$(deltafuse olive-config)"
    """
    check_file_name(output, "--output", "the file's path is printed there")
    with clear_errors(as_json):
        from .olive_config import PASS_ENTRY, PASS_NAME, write_package_config

        path = write_package_config(output, base)
        with own_output(f"{path} was written"):
            if as_json:
                print_json({"path": str(path), "pass": PASS_NAME, "entry": PASS_ENTRY})
            else:
                typer.echo(str(path))


@app.command("version")
def version_command(as_json: Json = False) -> None:
    """Print the version."""
    if as_json:
        print_json({"version": __version__})
    else:
        typer.echo(__version__)


def _run(work: Any, quiet: bool, as_json: bool) -> None:
    """Do the work with progress, print the report, and turn an unmet requirement into exit code 1."""
    unmet: RequirementError | None = None
    if as_json and sys.stdout is None:
        raise OutputError("standard output is closed: --json has nowhere to print")
    with progress_bar(quiet or as_json) as progress:
        try:
            report = work(progress)
        except RequirementError as error:
            unmet, report = error, error.report
    if as_json or (not quiet and sys.stdout is not None):
        with own_output(f"{report.output} was written" if report.output else "no model was written"):
            if as_json:
                typer.echo(report.to_json())
            else:
                show.render(report, show.console())
    if unmet is not None:
        typer.echo(f"error: {unmet}", err=True)
        raise typer.Exit(EXIT_REQUIRED)


def main() -> None:
    """Entry point of the ``deltafuse`` command."""
    try:
        with own_output():  # help and the version are printed by typer itself
            app()
    except OutputError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(EXIT_INPUT)


if __name__ == "__main__":
    main()
