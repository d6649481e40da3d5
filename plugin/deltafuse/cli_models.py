"""The commands that run models: ``verify``, ``bench``, ``run``, ``calibrate``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from . import show, show_models
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
from .errors import OptionError

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
                show_models.comparison(done, show.console())
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
                show_models.bench(done, show.console())
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
        from .clashes import check_not_read
        from .run import run_model, save_outputs
        from .sample_inputs import load_inputs

        check_not_read(output, [model, *([input_file] if input_file is not None else [])], "the outputs")
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
                show_models.run(found, show.console())


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
    rows: Annotated[
        int, typer.Option(min=0, metavar="N", help="Rows of each activation to keep, for `fuse --algorithm gptq`.")
    ] = 0,
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

    For the inputs of every product with a weight, for every state that is carried and for the latents that fused latent
    attention caches: the largest absolute value and the mean square of each channel. With --rows, rows of the first and
    the last too.
    """
    check_file_name(output, "--output", "--json prints the summary on standard output")
    with clear_errors(as_json):
        from .calibration import calibrate
        from .clashes import check_not_read
        from .model_save import check_target
        from .sample_inputs import load_inputs

        check_target(output)
        check_not_read(output, [model, *(input_files or [])], "the statistics")
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
                rows=rows,
            )
        done.save(output)
        with own_output(f"{output} was written"):
            if as_json:
                print_json(show_models.calibration_summary(done, output))
            elif not quiet and sys.stdout is not None:
                show_models.calibration(done, output, show.console())


def add_to(app: typer.Typer) -> None:
    """Make them commands of ``deltafuse``."""
    app.command("verify")(verify_command)
    app.command("bench")(bench_command)
    app.command("run")(run_command)
    app.command("calibrate")(calibrate_command)
