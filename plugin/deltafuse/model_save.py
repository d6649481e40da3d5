"""Saving: written aside in full, checked, then renamed into place, so that no file is ever half-written.

The new files are made in a temporary folder beside the target and moved with renames. Existing external data that
the model still reads from, or that belong to a model which is not being replaced, are never overwritten.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import onnx
import onnx_ir as ir

from .errors import OutputError
from .model_io import all_tensors, external_tensors, one_line, tensor_attributes
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
        OutputError: a directory, something that is no regular file, or in a folder that is missing or not writable.
    """
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


def save(
    model: ir.Model,
    target: str | os.PathLike[str],
    *,
    source: Path | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> Saved:
    """Write ``model`` to ``target``, weights beside it in ``<target>.data`` where they were external or are large.

    Weights are streamed tensor by tensor. The file passes ``onnx.checker`` before it takes its name, unless
    ``source``, the file that the model was loaded from, does not pass either: then that is a warning.

    Raises:
        OutputError: it cannot be written, or is not valid ONNX. Files that were there before are unchanged.
    """
    target = Path(target)
    check_target(target)
    if target.suffix.lower() in TEXT_SUFFIXES:
        raise OutputError(f"{target}: models are written in ONNX's binary form; give a name that ends in .onnx")
    read_from = {os.path.realpath(t.path) for t in external_tensors(model)}
    external = bool(read_from) or sum(t.nbytes for t in all_tensors(model)) > INLINE_LIMIT
    data_name = _free_data_name(target, read_from) if external else None
    _attributes_to_memory(model)
    try:
        with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as folder:
            aside = Path(folder)
            written = aside / target.name
            ir.save(
                model,
                str(written),
                external_data=data_name,
                size_threshold_bytes=INLINE_TENSOR,
                callback=_reporter(progress),
            )
            warnings = _check(written, source)
            if data_name not in (None, f"{target.name}.data"):
                warnings += (f"{target.name}.data exists already and was kept: the new weights are in {data_name}",)
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


def _attributes_to_memory(model: ir.Model) -> None:
    """Tensors in attributes (``Constant``) go into the model file: ONNX Runtime reads no external data there.

    Attributes are shared between a model and its copies, so they are replaced, not changed.
    """
    for node, attribute in list(tensor_attributes(model)):
        many = attribute.type == ir.AttributeType.TENSORS
        tensors = list(attribute.as_tensors()) if many else [attribute.as_tensor()]
        if any(isinstance(t, ir.ExternalTensor) for t in tensors):
            inside = ir.external_data.convert_tensors_from_external(
                [t for t in tensors if isinstance(t, ir.ExternalTensor)]
            )
            queue = iter(inside)
            tensors = [next(queue) if isinstance(t, ir.ExternalTensor) else t for t in tensors]
            value = tuple(tensors) if many else tensors[0]
            node.attributes[attribute.name] = ir.Attr(attribute.name, attribute.type, value)


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


def _free_data_name(target: Path, read_from: set[str]) -> str:
    """A name for the data file: ``<target>.data``, or a numbered one where that file is still needed.

    An existing file is replaced only if the model that is being replaced reads it and the new one does not.
    """
    replaceable: set[str] = set()
    if target.exists():
        try:
            old = ir.from_proto(onnx.load(str(target), load_external_data=False))
            replaceable = {os.path.realpath(target.parent / t.location) for t in external_tensors(old)}
        except Exception:  # whatever is there is no model: its files are not known to belong to it
            replaceable = set()
    number = 0
    while True:
        name = f"{target.name}.data" if number == 0 else f"{target.name}.{number}.data"
        path = target.parent / name
        real = os.path.realpath(path)
        taken = os.path.lexists(path)
        if not taken or (path.is_file() and not path.is_symlink() and real in replaceable and real not in read_from):
            return name
        number += 1


def _move_into_place(aside: Path, target: Path, data_name: str | None, warnings: tuple[str, ...]) -> Saved:
    model_bytes = (aside / target.name).stat().st_size
    if data_name is None or not (aside / data_name).exists():
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
        with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as folder:
            aside = Path(folder) / path.name
            aside.write_text(text, encoding="utf-8")
            os.replace(aside, path)
    except OSError as error:
        raise OutputError(f"{path} was not written: {error.strerror or error}") from error
