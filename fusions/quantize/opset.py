"""A newer opset for a model, where a quantized form asks for it."""

from __future__ import annotations

import onnx_ir as ir

from ...custom_ops.moe.spec import DOMAIN
from .spec import QuantizeError


def raise_opset(model: ir.Model, wanted: int) -> int:
    """Convert the model, in place, to at least opset ``wanted``. Returns the opset that it had.

    Functions of fused nodes stay functions: their bodies use no op whose meaning changes between opsets 18 and 27.

    Raises:
        QuantizeError: it can't be converted.
    """
    had = model.opset_imports.get("", 0)
    if had >= wanted:
        return had
    from onnxscript import version_converter

    kept = {key: function for key, function in model.functions.items() if function.domain == DOMAIN}
    imported = model.opset_imports.get(DOMAIN)
    for key in kept:
        del model.functions[key]  # the converter would write their bodies out
    try:
        version_converter.convert_version(model, wanted)
    except Exception as error:
        raise QuantizeError(f"the model's opset {had} could not be raised to {wanted}: {error}") from error
    finally:
        model.functions.update(kept)
    if imported is not None:
        model.opset_imports[DOMAIN] = imported
    for function in kept.values():
        function.opset_imports[""] = model.opset_imports[""]
    if model.opset_imports.get("", 0) < wanted:
        raise QuantizeError(f"the model's opset {had} could not be raised to {wanted}: an op of it has no newer form")
    return had
