"""What deltafuse raises. Every message says what was expected and what was found."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .fusions.result import FusionReport


class DeltaFuseError(Exception):
    """Base of all errors that deltafuse raises on purpose. The CLI shows the message alone and exits with 2."""


class ModelFileError(DeltaFuseError):
    """The model file cannot be read: missing, a directory, unreadable."""


class NotOnnxError(ModelFileError):
    """The file is there, but it is not an ONNX model."""


class TruncatedModelError(ModelFileError):
    """The file begins like an ONNX model and ends too early."""


class ExternalDataError(ModelFileError):
    """A tensor's external data file is missing, too short, or outside the model's folder."""


class OpsetError(DeltaFuseError):
    """The model's default-domain opset is missing, too old or unknown."""


class ModelKindError(DeltaFuseError, TypeError):
    """The argument is neither a path, an ``onnx.ModelProto``, an ``onnx_ir.Model`` nor a graph-surgeon ``Graph``."""


class OptionError(DeltaFuseError, ValueError):
    """An option has a value that it does not take."""


class OutputError(DeltaFuseError):
    """The result cannot be written or converted. Nothing was left half-written."""


class OrtError(DeltaFuseError):
    """onnxruntime is missing or too old for what was asked."""


class RequirementError(DeltaFuseError):
    """Fewer regions were fused than ``require`` asked for. Nothing was written.

    Attributes:
        report: the full report, with the reason of each refusal.
        missing: op name -> (asked for, fused).
    """

    def __init__(self, message: str, report: FusionReport, missing: dict[str, tuple[int, int]]) -> None:
        super().__init__(message)
        self.report = report
        self.missing = missing
