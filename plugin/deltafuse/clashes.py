"""Files of one run that must not be one another: what would overwrite the model that is read, or its weights."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

import onnx
import onnx_ir as ir

from .errors import OutputError
from .external_data import external_tensors


def check_clashes(source: Path | None, source_data: frozenset[str], output: Path | None, report: Path | None) -> None:
    """Check the files of a run before anything is done.

    Args:
        source: the model's file, if it came from one. The output may be it.
        source_data: real paths of the files that the model's external data are in.
        output: where the new model goes.
        report: where the report goes.

    Raises:
        OutputError: the output is a file of the model's external data; or the report is that, the model, the output,
            or a file of the output's external data.
    """
    if output is not None:
        for data in source_data:
            if _same(output, data):
                raise OutputError(f"{output} holds the model's external data: write the output to another file")
    if report is None:
        return
    taken: list[tuple[str | Path, str]] = [(data, "holds the model's external data") for data in source_data]
    if source is not None:
        taken.append((source, "is the model"))
    if output is not None:
        taken.append((output, "is the output"))
        taken += [(data, "holds the external data of the model that is at the output") for data in old_data(output)]
        numbered = re.compile(re.escape(output.name) + r"(\.\d+)?\.data")
        if _same(report.parent, output.parent) and numbered.fullmatch(report.name):
            taken.append((report, "is kept for the output's external data"))
    for path, what in taken:
        if _same(report, path):
            raise OutputError(f"{report} {what}: write the report to another file")


def check_not_read(written: Path | None, read: Iterable[str | os.PathLike[str]], what: str) -> None:
    """Check that a file to be written is none that the same run reads: no model, no external data of one, no inputs.

    Raises:
        OutputError: it is one. ``what`` names the contents in its text.
    """
    if written is None or not os.path.lexists(written):
        return
    for path in map(Path, read):
        if _same(written, path):
            raise OutputError(f"{written} is read here: write {what} to another file")
        if any(_same(written, data) for data in old_data(path)):
            raise OutputError(f"{written} holds the external data of {path}: write {what} to another file")


def old_data(path: Path) -> frozenset[str]:
    """The external data files of the model that is at ``path`` now; none where no model is there."""
    if not path.is_file():
        return frozenset()
    try:
        old = ir.from_proto(onnx.load(str(path), load_external_data=False))
    except Exception:  # whatever is there is no model: no files are known to belong to it
        return frozenset()
    return frozenset(os.path.realpath(path.parent / tensor.location) for tensor in external_tensors(old))


def _same(one: str | Path, other: str | Path) -> bool:
    try:
        # samefile: names that differ in case only, and hard links
        return os.path.realpath(one) == os.path.realpath(other) or os.path.samefile(one, other)
    except (OSError, ValueError):  # one of them is not there yet, or can never be
        return False
