"""Symbolic dims: choose a batch and a token count, and give every other dim a number that fits."""

from __future__ import annotations

import ast
import operator
from collections.abc import Mapping
from typing import Any

import onnx_ir as ir

_OPERATORS: dict[type, Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.USub: operator.neg,
}
_CALLS: dict[str, Any] = {"Mod": operator.mod, "Max": max, "Min": min, "max": max, "min": min}


class UnknownDim(Exception):
    """A dim that nothing gives a number to."""


def evaluate(expression: str, env: Mapping[str, int]) -> int:
    """The number of a dim's expression, such as ``s70 + 3`` or ``2*B``.

    Raises:
        UnknownDim: a symbol without a number, or something that is no arithmetic.
    """
    if expression in env:
        return env[expression]
    try:
        return _walk(ast.parse(expression.strip(), mode="eval").body, env)
    except (SyntaxError, TypeError, ZeroDivisionError) as error:
        raise UnknownDim(expression) from error


def _walk(node: ast.expr, env: Mapping[str, int]) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.Name) and node.id in env:
        return env[node.id]
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return int(_OPERATORS[type(node.op)](_walk(node.left, env), _walk(node.right, env)))
    if isinstance(node, ast.UnaryOp) and type(node.op) in _OPERATORS:
        return int(_OPERATORS[type(node.op)](_walk(node.operand, env)))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _CALLS:
        return int(_CALLS[node.func.id](*(_walk(a, env) for a in node.args)))
    raise UnknownDim(ast.unparse(node))


def symbol(dim: int | ir.SymbolicDim | None) -> str | None:
    """The dim's expression, None for a static or an unnamed one."""
    return None if dim is None or isinstance(dim, int) or dim.value is None else str(dim.value)


def concrete(value: ir.Value, env: Mapping[str, int]) -> list[int]:
    """The value's dims as numbers.

    Raises:
        UnknownDim: a dim without a number.
    """
    if value.shape is None:
        raise UnknownDim(f"the rank of {value.name!r}")
    dims: list[int] = []
    for dim in value.shape:
        if isinstance(dim, int):
            dims.append(dim)
            continue
        name = symbol(dim)
        if name is None:
            raise UnknownDim(f"an axis of {value.name!r} has neither a size nor a name")
        try:
            dims.append(evaluate(name, env))
        except UnknownDim as error:
            raise UnknownDim(f"{name}, a size of {value.name!r}, is none of the operands'") from error
    return dims
