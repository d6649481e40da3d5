"""What the releases of ONNX Runtime can do for us, as tried on their CPU wheels (tests/ep/test_runtimes.py).

The same in all of 1.27 to 1.32: overloads of model-local functions, calls of them offered whole to the plugin EP (in
subgraphs too), the record of the assignment, and states that share memory where shapes are known to be equal. What
differs is which models load, and which ops of com.microsoft are there (:data:`targets.ORT_OPS`).
"""

from __future__ import annotations

from dataclasses import dataclass

from ..custom_ops.common.refusal import Refusal
from .targets import ORT_OPS, parse_version


@dataclass(frozen=True)
class Runtime:
    """One minor release.

    Attributes:
        version: major and minor.
        max_opset: the newest opset of ONNX's own domain that it loads.
        max_ir_version: the newest IR version that it loads.
    """

    version: tuple[int, int]
    max_opset: int
    max_ir_version: int


RUNTIMES: tuple[Runtime, ...] = (
    Runtime((1, 27), max_opset=26, max_ir_version=13),
    Runtime((1, 28), max_opset=26, max_ir_version=13),
    Runtime((1, 29), max_opset=26, max_ir_version=13),
    Runtime((1, 30), max_opset=26, max_ir_version=13),
    Runtime((1, 31), max_opset=26, max_ir_version=13),
    Runtime((1, 32), max_opset=28, max_ir_version=14),
)


def runtime(ort_version: str) -> Runtime | None:
    """The entry of a version such as "1.31.1", or None where none is known (older, or newer than the table)."""
    wanted = parse_version(ort_version)
    return next((found for found in RUNTIMES if found.version == wanted), None)


def model_refusal(opset: int, ir_version: int, ort_version: str) -> Refusal | None:
    """Why this ONNX Runtime does not load a model of this opset and IR version, or None where it does or is unknown."""
    here = runtime(ort_version)
    if here is None:
        return None
    for what, has, most in (("opset", opset, here.max_opset), ("IR version", ir_version, here.max_ir_version)):
        if has > most:
            newer = [found for found in RUNTIMES if getattr(found, _FIELDS[what]) >= has]
            needs = (
                ".".join(map(str, newer[0].version)) + " or newer" if newer else "a newer release than is known here"
            )
            return Refusal(
                "ort-model",
                f"the model has {what} {has}: onnxruntime {ort_version} loads up to {most}; it needs {needs}",
            )
    return None


_FIELDS = {"opset": "max_opset", "IR version": "max_ir_version"}


def lacks(ort_version: str) -> list[str]:
    """What this ONNX Runtime lacks of what the newest in the table has, one line each; empty where it is not known."""
    here, newest = runtime(ort_version), RUNTIMES[-1]
    if here is None:
        return []
    lines = []
    if here.max_opset < newest.max_opset:
        lines.append(f"models above opset {here.max_opset} do not load (1.32: {newest.max_opset})")
    if here.max_ir_version < newest.max_ir_version:
        lines.append(f"models above IR version {here.max_ir_version} do not load (1.32: {newest.max_ir_version})")
    missing = [op for op, first in ORT_OPS.items() if here.version < first]
    if missing:
        lines.append(f"no com.microsoft {', '.join(missing)}: refused nodes cannot use them")
    return lines
