"""A spec as Markdown tables, and putting them into an op's README between two markers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

BEGIN, END = "<!-- begin: generated from spec.py by table.py -->", "<!-- end: generated -->"


def rows(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """One table."""
    every = [header, ["---" for _ in header], *lines]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in every)


def spec_tables(
    inputs: Mapping[str, str],
    outputs: Mapping[str, str],
    config: type[Any],
    meaning: Mapping[str, str],
    tolerances: Mapping[str, Mapping[str, float]],
) -> str:
    """The tables of inputs, outputs, attributes and tolerances.

    Args:
        inputs, outputs, tolerances: those of the spec.
        config: its dataclass, for the attributes' defaults.
        meaning: what each attribute means, in order.
    """
    operands = []
    for kind, table in (("input", inputs), ("output", outputs)):
        operands += [(kind, f"`{name}`", text) for name, text in table.items()]
    defaults = {field.name: field.default for field in fields(config)}
    attributes = [
        (f"`{name}`", "required" if defaults[name] is MISSING else f"`{defaults[name]}`", text)
        for name, text in meaning.items()
    ]
    columns = tuple(tolerances["cpu"])
    numbers = [(what, *(f"{row[column]:g}" for column in columns)) for what, row in tolerances.items()]
    return "\n\n".join(
        (
            rows(("", "name", "what"), operands),
            rows(("attribute", "default", "meaning"), attributes),
            rows(("tolerance of", *columns), numbers),
        )
    )


def between_markers(text: str, generated: str, begin_marker: str = BEGIN) -> str:
    """``text`` with what lies between the markers replaced by ``generated``.

    Raises:
        ValueError: a marker is missing.
    """
    head, begin, rest = text.partition(begin_marker)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"no {begin_marker!r} and {END!r} in the text")
    return f"{head}{begin_marker}\n\n{generated}\n\n{END}{tail}"


def write_readme(path: str, generated: str) -> None:
    """Put the tables into a README."""
    readme = Path(path)
    readme.write_text(between_markers(readme.read_text(encoding="utf-8"), generated), encoding="utf-8")
