"""The targets that a model can be fused for, and what each of them needs in order to run."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..custom_ops.common.refusal import Refusal
from .ops import OPS, OWN_DOMAINS

#: The oldest ONNX Runtime whose plugin interface (API version 27) the EP library speaks.
MIN_ORT = (1, 27)


@dataclass(frozen=True)
class Target:
    """One way to write a fused op into a model.

    Attributes:
        key: its name, as given to ``--target``.
        summary: one line for people.
        form: what stands in the model for a fused region.
        ops: the keys of the ops that it can express.
        min_ort: the oldest ONNX Runtime with which the fused form is run and tested.
        kernels_need_plugin: fused kernels run only where the plugin EP is registered; elsewhere ORT inlines the body.
    """

    key: str
    summary: str
    form: str
    ops: tuple[str, ...]
    min_ort: tuple[int, int] = MIN_ORT
    kernels_need_plugin: bool = False


TARGETS: dict[str, Target] = {
    "plugin": Target(
        key="plugin",
        summary="calls of deltafuse functions: the plugin EP runs them as one kernel, stock ORT inlines their bodies",
        form="model-local function call",
        ops=tuple(OPS),
        kernels_need_plugin=True,
    ),
    "portable": Target(
        key="portable",
        summary="standard ONNX ops only: the function bodies are written out in the graph",
        form="standard ops",
        ops=tuple(OPS),
    ),
}


def parse_version(text: str) -> tuple[int, int]:
    """Major and minor of a version such as ``1.32.0`` or ``1.33.0.dev20261101``; (0, 0) where there are none."""
    found = re.match(r"\s*v?(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def refusal(op: str, target: str, ort_version: str) -> Refusal | None:
    """Why a model fused for ``target`` cannot run its ``op`` on this ONNX Runtime, or None where it can."""
    if op not in OPS:
        return Refusal("op", f"op {op!r}: expected one of {', '.join(OPS)}")
    if target not in TARGETS:
        return Refusal("target", f"target {target!r}: expected one of {', '.join(TARGETS)}")
    wanted = TARGETS[target]
    if op not in wanted.ops and OPS[op].domain in OWN_DOMAINS:  # others' calls have a function body: all targets do
        return Refusal("op-target", f"target {target} has no form of {OPS[op].qualified_name}")
    if parse_version(ort_version) < wanted.min_ort:
        needs = ".".join(map(str, wanted.min_ort))
        return Refusal("ort-version", f"ONNX Runtime {ort_version}: target {target} needs {needs} or newer")
    return None


def can_run(op: str, target: str, ort_version: str) -> bool:
    """Can a model fused for ``target`` run its ``op`` on this ONNX Runtime? (:func:`refusal` says why not.)"""
    return refusal(op, target, ort_version) is None


#: The oldest ONNX Runtime whose com.microsoft domain has an op, as its CPU builds list them. LinearAttention has a
#: float32 CPU kernel and float32 and float16 CUDA kernels in all of them; GatedDeltaNet has a CPU kernel from 1.32 on.
ORT_OPS: dict[str, tuple[int, int]] = {
    "LinearAttention": (1, 27),
    "CausalConvWithState": (1, 27),
    "QMoE": (1, 27),
    "GatedRMSNorm": (1, 29),
    "GatedDeltaNet": (1, 30),
}

#: The op of com.microsoft that stands in for a fused node that deltafuse's kernels refuse, by the fused op.
STAND_INS: dict[str, str] = {"KimiDeltaAttention": "LinearAttention", "GroupedQMoE": "QMoE"}
#: Why no op of ONNX Runtime stands in for others: their function bodies run.
NO_STAND_IN: dict[str, str] = {
    "LatentAttention": "no op of ONNX Runtime takes a cache of latents (MultiHeadAttention and Attention take keys and "
    "values of every head, GroupQueryAttention those of one width)",
}


def stand_in_refusal(op_type: str) -> Refusal | None:
    """Why no op of com.microsoft stands in for this fused op, or None where one does."""
    if op_type in STAND_INS:
        return None
    return Refusal("ort-op", NO_STAND_IN.get(op_type, f"ONNX Runtime has no op for deltafuse::{op_type}"))


def ort_op_refusal(op_type: str, ort_version: tuple[int, int]) -> Refusal | None:
    """Why this ONNX Runtime does not have the com.microsoft op, or None where it has."""
    first = ORT_OPS.get(op_type)
    if first is None:
        return Refusal("ort-op", f"com.microsoft::{op_type}: no known ONNX Runtime has it")
    if ort_version < first:
        needs, has = (".".join(map(str, version)) for version in (first, ort_version))
        return Refusal("ort-version", f"com.microsoft::{op_type} needs ONNX Runtime {needs} or newer, this is {has}")
    return None
