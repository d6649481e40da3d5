"""Saving: written aside in full, checked, then renamed into place, so that no file is ever half-written.

The new files are made in a temporary folder beside the target and moved with renames. Existing external data that
the model still reads from, or that belong to a model which is not being replaced, are never overwritten.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import onnx
import onnx_ir as ir

from .clashes import old_data
from .errors import OutputError
from .external_data import all_tensors, attributes_to_memory, data_files
from .model_io import one_line
from .onnx_file import TEXT_SUFFIXES

#: Weights above this go to an external file; protobuf's own limit is 2 GiB, with the graph and its copies.
INLINE_LIMIT = 3 << 29  # 1.5 GiB
#: Tensors up to this many bytes stay in the model file, where shape inference can see them.
INLINE_TENSOR = 1024


@dataclass
class Saved:
    """What was written: the model's file and that of its external data, if it has one, with their sizes in bytes."""

    path: Path
    bytes: int
    data_path: Path | None = None
    data_bytes: int = 0
    warnings: tuple[str, ...] = ()


def check_target(target: Path) -> None:
    """Can a model be written to ``target``? Asked before the work begins.

    Raises:
        OutputError: a directory, something that is no regular file, in a folder that is missing or not writable, or a
            name that is too long.
    """
    try:
        _check_target(target)
    except (OSError, ValueError) as error:  # too long a name or path, a folder that may not be entered, a null byte
        raise OutputError(f"{target} cannot be written: {getattr(error, 'strerror', None) or error}") from error


def _check_target(target: Path) -> None:
    if target.is_dir():
        raise OutputError(f"{target} is a directory: expected the name of the file to write")
    if target.exists() and not target.is_file():
        raise OutputError(
            f"{target} is not a regular file: a model cannot be written there (use --dry-run to only look)"
        )
    folder = target.parent
    if not folder.is_dir():
        raise OutputError(f"{target} cannot be written: there is no folder {folder}")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise OutputError(f"{target} cannot be written: folder {folder} is not writable")
    _check_name(folder, target.name)


def _check_name(folder: Path, name: str) -> None:
    if "\0" in name:
        raise ValueError("its name has a null byte")
    longest, found = os.pathconf(folder, "PC_NAME_MAX"), len(os.fsencode(name))
    if found > longest > 0:
        raise OutputError(f"{folder / name} cannot be written: its name has {found} bytes, {longest} are possible")


def save(
    model: ir.Model,
    target: str | os.PathLike[str],
    *,
    source: Path | None = None,
    keep: frozenset[str] = frozenset(),
    progress: Callable[[str, int, int], None] | None = None,
    external: bool | None = None,
    data_name: str | None = None,
    size_threshold: int = INLINE_TENSOR,
) -> Saved:
    """Write ``model`` to ``target``, weights beside it in ``<target>.data`` where they were external or are large.

    ``external`` says whether they go there, whatever they were (large ones always do), ``data_name`` under which name,
    and ``size_threshold`` from how many bytes on.

    Weights are streamed tensor by tensor. The file passes ``onnx.checker`` before it takes its name, unless
    ``source``, the file that the model was loaded from, does not pass either: then that is a warning. ``keep``: real
    paths of data files that are not replaced, besides those that ``model`` reads from.

    Raises:
        OutputError: it cannot be written, or is not valid ONNX. Files that were there before are unchanged.
    """
    target = Path(target)
    check_target(target)
    if target.suffix.lower() in TEXT_SUFFIXES:
        raise OutputError(f"{target}: models are written in ONNX's binary form; give a name that ends in .onnx")
    read_from = data_files(model)
    if external is None:
        external = bool(read_from)
    if not external:
        external = sum(t.nbytes for t in all_tensors(model)) > INLINE_LIMIT
    wanted = data_name or f"{target.name}.data"
    data_name = _free_data_name(target, wanted, read_from | keep) if external else None
    if data_name is not None:
        _check_name(target.parent, data_name)
    attributes_to_memory(model)
    try:
        with tempfile.TemporaryDirectory(prefix=".deltafuse.", dir=target.parent) as folder:
            aside = Path(folder)
            written = aside / target.name
            ir.save(
                model,
                str(written),
                external_data=data_name,
                size_threshold_bytes=size_threshold,
                callback=_reporter(progress),
            )
            warnings = _check(written, source)
            if data_name is not None and not _has_bytes(aside / data_name):
                data_name = None  # all weights are small ones, which went into the model's file
            if data_name not in (None, wanted):
                warnings += (f"{wanted} exists already and was kept: the new weights are in {data_name}",)
            with _alone_in(target.parent):
                return _move_into_place(aside, target, data_name, warnings)
    except OutputError:
        raise
    except (OSError, ValueError, ir.serde.SerdeError) as error:
        raise OutputError(f"{target} was not written: {one_line(error)}") from error


def _reporter(
    progress: Callable[[str, int, int], None] | None,
) -> Callable[[ir.TensorProtocol, ir.external_data.CallbackInfo], None] | None:
    if progress is None:
        return None

    def report(tensor: ir.TensorProtocol, info: ir.external_data.CallbackInfo) -> None:
        progress("save", info.index + 1, info.total)

    return report


def _check(written: Path, source: Path | None) -> tuple[str, ...]:
    """Valid ONNX? A model that was not valid before (ORT's optimiser writes such) need not become so."""
    try:
        onnx.checker.check_model(str(written))
        return ()
    except Exception as error:  # the checker's ValidationError, and protobuf's errors
        problem = one_line(error)
    if source is not None:
        try:
            onnx.checker.check_model(onnx.load(str(source)) if source.suffix in TEXT_SUFFIXES else str(source))
        except Exception:
            return (f"the result does not pass onnx.checker, nor does {source.name}: {problem}",)
    raise OutputError(f"the result is not valid ONNX and was not written: {problem}")


def _free_data_name(target: Path, wanted: str, keep: frozenset[str]) -> str:
    """A name for the data file: the one that is wanted, or a numbered one where that file is still needed.

    An existing file is replaced only if the model that is being replaced reads it and it is not one to ``keep``.
    """
    replaceable = old_data(target) - keep
    number = 0
    while True:
        name = wanted if number == 0 else f"{wanted.removesuffix('.data')}.{number}.data"
        path = target.parent / name
        real = os.path.realpath(path)
        taken = os.path.lexists(path)
        if not taken or (path.is_file() and not path.is_symlink() and real in replaceable):
            return name
        number += 1


def _has_bytes(path: Path) -> bool:
    return path.exists() and path.stat().st_size > 0


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Let no other deltafuse rename into ``folder`` meanwhile: a model of one run would read the weights of another."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(ImportError, OSError):  # file systems without locks
            import fcntl

            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _move_into_place(aside: Path, target: Path, data_name: str | None, warnings: tuple[str, ...]) -> Saved:
    model_bytes = (aside / target.name).stat().st_size
    if data_name is None:
        os.replace(aside / target.name, target)
        return Saved(target, model_bytes, warnings=warnings)
    data_bytes = (aside / data_name).stat().st_size
    data_path = target.parent / data_name
    kept = aside / "replaced.data"
    if data_path.exists():
        os.replace(data_path, kept)
    try:
        os.replace(aside / data_name, data_path)
        os.replace(aside / target.name, target)
    except BaseException:  # an interrupt too: the old model keeps its own data
        data_path.unlink(missing_ok=True)
        if kept.exists():
            os.replace(kept, data_path)
        raise
    return Saved(target, model_bytes, data_path, data_bytes, warnings)


def write_text(path: Path, text: str) -> None:
    """Write a small text file in one step.

    Raises:
        OutputError: it cannot be written.
    """
    check_target(path)
    try:
        with tempfile.TemporaryDirectory(prefix=".deltafuse.", dir=path.parent) as folder:
            aside = Path(folder) / path.name
            aside.write_text(text, encoding="utf-8")
            os.replace(aside, path)
    except (OSError, ValueError) as error:
        raise OutputError(f"{path} was not written: {getattr(error, 'strerror', None) or error}") from error
