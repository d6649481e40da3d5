"""The model that ``session`` and ``capture`` are given: what ONNX Runtime takes, and what it says when it does not."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

from .discovery import EP_NAME
from .errors import DeltaFuseError, ModelKindError, NotOnnxError, OptionError, OrtError, OutputError

#: What the plugin EP answers to an option that it does not understand, in ONNX Runtime's account of it.
_EP_SAYS = re.compile(rf"{EP_NAME}: (there is no option |\w+ '[^']*': ).*")


def for_ort(model: Any) -> str | os.PathLike[str] | bytes:
    """A model as ``InferenceSession`` takes it: a path or bytes as they are, a model in memory serialised.

    Raises:
        ModelKindError: of another type, or with external data of which the folder is not known.
        OutputError: over 2 GiB.
    """
    if isinstance(model, (str, os.PathLike)) and isinstance(os.fspath(model), str):
        return model
    if isinstance(model, (bytes, bytearray, memoryview)):
        return bytes(model)
    # Only who has imported these packages can hold a model of theirs.
    onnx, onnx_ir = sys.modules.get("onnx"), sys.modules.get("onnx_ir")
    if onnx_ir is not None and isinstance(model, onnx_ir.Model):
        from .external_data import data_files
        from .model_io import to_proto

        if data_files(model):
            raise ModelKindError(
                "the model has external data: save it, or give deltafuse.fuse an output; give the path"
            )
        return to_proto(model).SerializeToString()
    if onnx is not None and isinstance(model, onnx.ModelProto):
        try:
            return bytes(model.SerializeToString())
        except Exception as error:  # protobuf's errors have no common base
            raise OutputError(f"the ModelProto cannot be serialised ({error}): save it, and give the path") from error
    raise ModelKindError(
        "expected a path, the bytes of a model, an onnx.ModelProto or an onnx_ir.Model, "
        f"got {type(model).__module__}.{type(model).__qualname__}"
    )


def refusal(model: str | os.PathLike[str] | bytes, error: Exception, ort_version: str) -> DeltaFuseError:
    """Why ONNX Runtime made no session of this model.

    Because of its file; because of an opset or IR version that is too new for this ONNX Runtime, with the one that it
    needs; else in ONNX Runtime's own words.
    """
    from .onnx_file import check_file, versions
    from .registry.runtimes import model_refusal

    what = "the model" if isinstance(model, bytes) else os.fspath(model)
    text = " ".join(str(error).split()) or type(error).__name__
    if not isinstance(model, bytes):
        try:
            check_file(Path(model))
        except DeltaFuseError as found:
            return found
    if (ours := _EP_SAYS.search(text)) is not None:
        return OptionError(ours[0])
    too_new = model_refusal(*versions(model), ort_version)
    if too_new is not None:
        return OrtError(f"{what}: {too_new.reason} ({text})")
    if type(error).__name__ == "InvalidProtobuf":
        return NotOnnxError(f"{what} is not an ONNX model, or is damaged: {text}")
    return OrtError(f"onnxruntime {ort_version} does not take {what}: {text}")
