"""What the commands share: exit codes, one-line errors, progress, and the options' parsers."""

from __future__ import annotations

import json
import math
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column

from . import show
from .errors import DeltaFuseError, OutputError

EXIT_NO = 1  # the work was done and the answer is no: fewer fused than required, numbers differ, no kernels here
EXIT_REQUIRED = EXIT_NO  # fewer regions were fused than --require asked for
EXIT_INPUT = 2  # bad input, bad usage, or the result cannot be written
EXIT_BUG = 3  # an error that deltafuse did not expect
EXIT_INTERRUPTED = 130  # Ctrl-C

#: Options that commands share.
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout, and nothing else there.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors; show no progress.")]


@contextmanager
def clear_errors(as_json: bool = False) -> Iterator[None]:
    """Turn exceptions into one line on stderr and an exit code; ``DELTAFUSE_TRACEBACK=1`` shows where they arose.

    ``as_json``: stdout gets an object with ``error`` and ``exit_code`` besides.
    """
    try:
        yield
    except (typer.Exit, typer.Abort, typer.BadParameter, SystemExit):
        raise
    except DeltaFuseError as error:
        fail(str(error), EXIT_INPUT, as_json)
    except KeyboardInterrupt:
        fail("interrupted; nothing was half-written", EXIT_INTERRUPTED, as_json)
    except BrokenPipeError:
        # The reader of our output left (`| head`): keep Python from complaining about it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(EXIT_INPUT) from None
    except Exception as error:
        text = " ".join(str(error).split())
        message = f"unexpected {type(error).__name__}: {text} (DELTAFUSE_TRACEBACK=1 shows where; please report it)"
        fail(message, EXIT_BUG, as_json)


@contextmanager
def own_output(said: str = "") -> Iterator[None]:
    """Write to stdout inside of this: where it takes nothing, the error adds what was ``said`` to be done."""
    try:
        yield
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        if sys.stdout is not None:  # what is left in its buffer would fail again at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        reason = error.strerror or str(error)
        raise OutputError("; ".join(filter(None, (f"standard output cannot be written: {reason}", said)))) from error


def print_json(value: Any) -> None:
    """One JSON object on stdout; what is not a finite number becomes null."""
    if sys.stdout is None:
        raise OutputError("standard output is closed: --json has nowhere to print")
    typer.echo(json.dumps(finite(value), indent=2, default=str, allow_nan=False))


def finite(value: Any) -> Any:
    """JSON-ready data with null for what is not a finite number."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    return [finite(item) for item in value] if isinstance(value, (list, tuple)) else value


def fail(message: str, code: int, as_json: bool = False) -> None:
    """Print one error line and leave with ``code``."""
    if os.environ.get("DELTAFUSE_TRACEBACK") == "1":
        traceback.print_exc(file=sys.stderr)
    if as_json and sys.stdout is not None:
        with suppress(OSError):
            typer.echo(json.dumps({"error": message, "exit_code": code}, indent=2))
    out = show.console(stderr=True)
    out.soft_wrap = True  # one line, whatever the terminal's width
    out.print(f"[bold red]error:[/] {escape(message)}")
    raise typer.Exit(code)


@contextmanager
def progress_bar(quiet: bool) -> Iterator[Callable[[str, int, int], None] | None]:
    """A progress display on stderr where that is a terminal; None in pipes and with ``--quiet``."""
    out = show.console(stderr=True)
    if quiet or not out.is_terminal:
        yield None
        return
    columns = (
        TextColumn("{task.description}", table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis")),
        BarColumn(20),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=out, transient=True, expand=True) as bar:
        task = bar.add_task("load", total=None)

        def report(stage: str, done: int, total: int) -> None:
            bar.update(task, description=escape(stage), completed=done, total=total or None)

        yield report


def check_file_name(path: Path | None, option: str, instead: str) -> None:
    """``-`` is no file: nothing is written to stdout but reports."""
    if path is not None and str(path) == "-":
        raise typer.BadParameter(f"'-' is not a file, and {instead}", param_hint=option)


def parse_require(values: list[str]) -> dict[str, int]:
    """``["kda=2"]`` as ``{"kda": 2}``; which ops there are is checked by ``fuse``."""
    result: dict[str, int] = {}
    for value in values:
        op, _, count = value.partition("=")
        if not op or not count.isascii() or not count.isdigit():
            raise typer.BadParameter(f"{value!r}: expected OP=COUNT, for example kda=2", param_hint="--require")
        if result.setdefault(op, int(count)) != int(count):
            raise typer.BadParameter(
                f"{op}={result[op]} and {op}={count} contradict each other", param_hint="--require"
            )
    return result


def parse_dims(values: list[str] | None) -> dict[str, int]:
    """``["S=12"]`` as ``{"S": 12}``."""
    result: dict[str, int] = {}
    for value in values or []:
        name, _, size = value.rpartition("=")
        if not name or not size.isascii() or not size.isdigit():
            raise typer.BadParameter(f"{value!r}: expected NAME=SIZE, for example S=12", param_hint="--dim")
        result[name] = int(size)
    return result


def parse_numbers(text: str, option: str) -> list[int]:
    """``"1,2,3"`` or ``"1 2 3"`` as ``[1, 2, 3]``."""
    parts = text.replace(",", " ").split()
    if not parts or not all(part.isascii() and part.isdigit() for part in parts):
        raise typer.BadParameter(f"{text!r}: expected whole numbers, for example 1,2,3", param_hint=option)
    return [int(part) for part in parts]


def parse_names(text: str | None) -> list[str] | None:
    """``"kda,mla"`` as ``["kda", "mla"]``; None where nothing was given."""
    return None if text is None else text.replace(",", " ").split()
