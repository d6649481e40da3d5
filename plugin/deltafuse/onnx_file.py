"""Is this file an ONNX model? Looked at before it is parsed, because protobuf reads some garbage without complaint."""

from __future__ import annotations

import os
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import BinaryIO

from .errors import ModelFileError, NotOnnxError, TruncatedModelError

#: ``ModelProto``'s fields (onnx.proto3) and the wire type of each: 0 varint, 2 length-delimited.
_MODEL_FIELDS = {1: 0, 2: 2, 3: 2, 4: 2, 5: 0, 6: 2, 7: 2, 8: 2, 14: 2, 20: 2, 25: 2, 26: 2}
_GRAPH_FIELD = 7
_IR_VERSION_FIELD, _OPSET_FIELD = 1, 8

#: Formats that onnx reads as text, by file name; they have no binary form to check.
TEXT_SUFFIXES = (".textproto", ".prototxt", ".pbtxt", ".json", ".onnxjson", ".onnxtxt", ".onnxtext")

_OTHER_FILES: tuple[tuple[bytes, str], ...] = (
    (b"version https://git-lfs", "a Git LFS pointer: the model itself was not downloaded (`git lfs pull`)"),
    (b"\xfd7zXZ\x00", "compressed with xz: unpack it first (`xz -dk`)"),
    (b"\x1f\x8b", "compressed with gzip: unpack it first (`gunzip -k`)"),
    (b"\x28\xb5\x2f\xfd", "compressed with zstd: unpack it first (`zstd -d`)"),
    (b"PK\x03\x04", "a zip archive (a PyTorch checkpoint or TorchScript file is one): export it to ONNX first"),
    (b"GGUF", "a GGUF model"),
    (b"\x89HDF", "an HDF5 file"),
    (b"ORTM", "an ORT-format model: give the .onnx file that it was made from"),
    (b"<!DOCTYPE", "an HTML page"),
    (b"<html", "an HTML page"),
)


def check_file(path: Path) -> int:
    """Check that ``path`` is a readable file which has the outline of an ONNX model; return its size.

    Raises:
        ModelFileError: no such file, a directory, or not readable.
        NotOnnxError: something else than an ONNX model.
        TruncatedModelError: it begins as an ONNX model, but a part reaches past the end of the file.
    """
    try:
        return _check_file(path)
    except OSError as error:  # also too long a name, and a folder that may not be entered
        raise ModelFileError(f"{path} cannot be read: {error.strerror or error}") from error


def _check_file(path: Path) -> int:
    if path.is_dir():
        inside = sorted(p.name for p in path.glob("*.onnx"))[:3]
        hint = f"; it holds {', '.join(inside)}" if inside else ""
        raise ModelFileError(f"{path} is a directory: expected an ONNX file{hint}")
    if not path.exists():
        raise ModelFileError(f"{path}: no such file")
    if not path.is_file():
        raise ModelFileError(f"{path} is not a regular file: expected an ONNX file")
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size == 0:
            raise NotOnnxError(f"{path} is empty: expected an ONNX model")
        if path.suffix.lower() not in TEXT_SUFFIXES:
            _check_outline(path, file, size)
        return size


def _check_outline(path: Path, file: BinaryIO, size: int) -> None:
    head = file.read(32)
    for magic, what in _OTHER_FILES:
        if head.startswith(magic):
            raise NotOnnxError(f"{path} is not an ONNX model: it is {what}")
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= size:
        raise NotOnnxError(f"{path} is not an ONNX model: it is a safetensors file")
    file.seek(0)
    seen_graph = False
    fields = 0
    while file.tell() < size:
        start = file.tell()
        tag = _varint(file)
        if tag is None:
            raise _early_end(path, fields, start, size, "a field's number")
        field, wire_type = tag >> 3, tag & 7
        # A newer ONNX may add fields; one that is known must have its own wire type.
        if field == 0 or wire_type not in (0, 1, 2, 5) or _MODEL_FIELDS.get(field, wire_type) != wire_type:
            raise NotOnnxError(f"{path} is not an ONNX model: byte {start} begins no field of a ModelProto")
        if fields == 0 and field not in _MODEL_FIELDS:
            raise NotOnnxError(f"{path} is not an ONNX model: its first field has number {field}")
        length = {1: 8, 5: 4}.get(wire_type, 0)
        if wire_type in (0, 2):
            value = _varint(file)
            if value is None:
                raise _early_end(path, fields, start, size, "a field's value")
            length = value if wire_type == 2 else 0
        if file.tell() + length > size:
            missing = file.tell() + length - size
            if fields == 0:
                raise NotOnnxError(f"{path} is not an ONNX model: its first field would need {length:,} bytes")
            raise _early_end(path, fields, start, size, f"the last {missing:,} bytes of field {field}")
        file.seek(length, os.SEEK_CUR)
        seen_graph = seen_graph or field == _GRAPH_FIELD
        fields += 1
    if not seen_graph:
        raise NotOnnxError(f"{path} is not an ONNX model: it holds no graph")


def versions(model: str | os.PathLike[str] | bytes) -> tuple[int, int]:
    """The opset of ONNX's own domain and the IR version of a binary model, each 0 where it does not say.

    Reads the outline only: neither the graph nor the weights in it.

    Raises:
        ModelFileError: it cannot be read.
    """
    try:
        with BytesIO(model) if isinstance(model, bytes) else Path(model).open("rb") as file:
            return _versions(file)
    except OSError as error:
        raise ModelFileError(f"{os.fspath(model)!r} cannot be read: {error.strerror or error}") from error


def _versions(file: BinaryIO) -> tuple[int, int]:
    opset = ir_version = 0
    for field, wire_type, value in _fields(file):
        if field == _IR_VERSION_FIELD and wire_type == 0:
            ir_version = value
        elif field == _OPSET_FIELD and wire_type == 2:
            inner = BytesIO(file.read(value))
            domain, version = b"", 0
            for inner_field, inner_type, inner_value in _fields(inner):
                if inner_type == 2:
                    text = inner.read(inner_value)
                    domain = text if inner_field == 1 else domain
                elif inner_field == 2 and inner_type == 0:
                    version = inner_value
            if domain in (b"", b"ai.onnx"):
                opset = max(opset, version)
        elif wire_type == 2:
            file.seek(value, os.SEEK_CUR)
    return opset, ir_version


def _fields(file: BinaryIO) -> Iterator[tuple[int, int, int]]:
    """Number, wire type, and value or length of each field; the caller moves past what has a length."""
    while (tag := _varint(file)) is not None:
        field, wire_type = tag >> 3, tag & 7
        if wire_type in (1, 5):
            file.seek(8 if wire_type == 1 else 4, os.SEEK_CUR)
            continue
        value = _varint(file) if wire_type in (0, 2) else None
        if value is None:  # no protobuf, or it ends here
            return
        yield field, wire_type, value


def _early_end(path: Path, fields: int, start: int, size: int, what: str) -> ModelFileError:
    if fields == 0:
        return NotOnnxError(f"{path} is not an ONNX model: its {size:,} bytes hold no complete field")
    return TruncatedModelError(
        f"{path} is truncated: it ends after {size:,} bytes, without {what} (begun at byte {start:,}); copy it again"
    )


def _varint(file: BinaryIO) -> int | None:
    """One base-128 number, or None where the file ends or it is longer than 64 bits."""
    value = 0
    for shift in range(0, 70, 7):
        byte = file.read(1)
        if not byte:
            return None
        value |= (byte[0] & 0x7F) << shift
        if byte[0] < 0x80:
            return value
    return None
