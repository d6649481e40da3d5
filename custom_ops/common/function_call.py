"""What calls of all ops have in common: attribute types, shapes, and putting a function into a model."""

from __future__ import annotations

import onnx_ir as ir

#: The IR version from which function overloads are part of the format.
OVERLOAD_IR_VERSION = 10

Dim = int | ir.SymbolicDim


def attribute_type(value: float | str) -> ir.AttributeType:
    """The ONNX type of an attribute that holds ``value``."""
    if isinstance(value, str):
        return ir.AttributeType.STRING
    return ir.AttributeType.FLOAT if isinstance(value, float) else ir.AttributeType.INT


def shape_of(*dims: Dim | None) -> ir.Shape:
    """A shape; None is a dimension of which nothing is known."""
    return ir.Shape([ir.SymbolicDim(None) if dim is None else dim for dim in dims])


def attach_function(model: ir.Model, function: ir.Function, version: int) -> None:
    """Put the function into the model, once, and import its domain in ``version``.

    The model's IR version is raised to 10 where it is lower: overloads belong to the format only since then (ORT
    reads them at 9 as well, other readers need not).
    """
    model.functions.setdefault(function.identifier(), function)
    model.opset_imports[function.domain] = version
    model.ir_version = max(model.ir_version or 0, OVERLOAD_IR_VERSION)
