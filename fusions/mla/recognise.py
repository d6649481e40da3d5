"""From a block to candidates: what the fused op would be there. The proof decides; nothing is believed here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import onnx_ir as ir

from ...custom_ops.mla.spec import MlaConfig
from ..candidate import Candidate, Operand, Parameter, Piece, Result
from ..graph import GraphView, is_op, static_dims
from ..region import Region, backward
from .block import Block, places
from .flow import row_width
from .layout import (
    heads_piece,
    mask_piece,
    output_result,
    packed_value,
    quantized_weight,
    query_operand,
    rows_piece,
    wide_piece,
)
from .masks import Mask, read_masks
from .op import MLA
from .symbolic import Symbolic


def candidates(view: GraphView, symbolic: Symbolic, block: Block, name: str, form: str) -> Iterator[Candidate]:
    """Candidates of a block, likeliest first."""
    masks = read_masks(view, symbolic, block.core.terms, block.core.causal, places(block))
    for mask in masks:
        for rope, cos, sin in _rotations(view, block):
            found = _candidate(view, block, mask, rope, cos, sin, name, form)
            if found is not None:
                yield found


def readable_masks(view: GraphView, symbolic: Symbolic, block: Block) -> bool:
    """Is there a form in which the op takes the block's masks?"""
    masks = read_masks(view, symbolic, block.core.terms, block.core.causal, places(block))
    return any(m.operand is None or mask_piece(block, m) is not None for m in masks)


def _rotations(view: GraphView, block: Block) -> list[tuple[str, ir.Value | None, ir.Value | None]]:
    """(rope, cos, sin), likeliest first."""
    if not block.factors:
        return [("none", None, None)]
    if len(block.factors) != 2:
        return []
    a, b = block.factors
    first, second = (b, a) if _is_sine(view, a) and not _is_sine(view, b) else (a, b)
    kinds = _kinds(view, block)
    return [(kind, *pair) for pair in ((first, second), (second, first)) for kind in kinds]


def _is_sine(view: GraphView, value: ir.Value) -> bool:
    """Is it a sine, by its operation or its name?"""
    for _ in range(12):
        producer = value.producer()
        if is_op(producer, "Sin", "Cos"):
            return is_op(producer, "Sin")
        if producer is None or not producer.inputs or producer.inputs[0] is None:
            break
        value = producer.inputs[0]
    return (value.name or "").lower().startswith(("s", "sin"))


def _kinds(view: GraphView, block: Block) -> list[str]:
    paired = any(
        (is_op(n, "Slice") and len(n.inputs) > 4 and view.ints(n.inputs[4]) == [2])
        or (is_op(n, "Reshape") and (d := static_dims(n.outputs[0])) is not None and len(d) == 5 and d[-1] == 2)
        for n in block.q_flow.nodes
    )
    return ["deinterleaved", "interleaved", "half"] if paired else ["half", "deinterleaved", "interleaved"]


def _candidate(
    view: GraphView,
    block: Block,
    mask: Mask,
    rope: str,
    cos: ir.Value | None,
    sin: ir.Value | None,
    name: str,
    form: str,
) -> Candidate | None:
    operands: dict[str, Operand] = {}
    parameters: dict[str, Parameter] = {}
    results: dict[str, Result] = {}
    absorbed: list[str] = []
    settings: dict[str, object] = {}

    def give(operand: str, piece: Piece | None) -> bool:
        if piece is None:
            return False
        operands[operand] = Operand((piece,))
        return True

    queries = query_operand(block)
    if queries is None:
        return None
    operands["q"] = queries
    packed = packed_value(view, block)
    if packed is not None:
        if not give("latent", wide_piece(packed, block.rank + block.rope)):
            return None
        settings["packed_latent"] = True
    else:
        if not give("latent", wide_piece(block.latent.raw, block.rank)):
            return None
        if block.k_rope is not None and not give("k_rope", wide_piece(block.k_rope, block.rope)):
            return None
    quantized = quantized_weight(block)
    if quantized is not None:
        operands["kv_b_weight"] = quantized
    else:
        _weights(block, parameters)
    if block.latent.epsilon is not None:
        settings |= {"has_kv_norm": True, "kv_norm_eps": short(block.latent.epsilon)}
        latent, rank = block.latent, block.rank
        parameters["kv_norm_weight"] = Parameter(
            tuple(latent.weights), lambda a: latent.norm_weight(rank, a), form=f"{latent.factor}"
        )
        absorbed.append("kv norm")
    if rope != "none":
        assert cos is not None and sin is not None
        width = row_width(cos)
        if width not in (block.rope, block.rope // 2):
            return None
        for operand, value in (("cos", cos), ("sin", sin)):
            piece = rows_piece(value, width)
            if piece is None:
                return None
            if view.is_const(value):
                parameters[operand] = Parameter((value,), _constant_rows(width), form="rows")
            else:
                operands[operand] = Operand((piece,))
        settings["cos_width"] = width
        absorbed.append("rope")
    if block.q_scale is not None:
        if not give("q_scale", rows_piece(block.q_scale, 1)):
            return None
        settings["has_q_scale"] = True
        absorbed.append("query scale")
    if mask.operand is not None:
        piece = mask_piece(block, mask)
        if piece is None:
            return None
        operands["attn_mask"] = Operand((piece,))
        settings |= {"has_mask": True, "bool_mask": mask.is_bool}
    if block.core.causal or (block.core.terms and (mask.operand is None or mask.keys_only)):
        absorbed.append("mask")
    if block.end.gate is not None:
        give("gate", heads_piece(block.end.gate, block.heads))
        if "gate" not in operands:
            return None
        settings["gate_activation"] = "sigmoid"
        absorbed.append("output gate")
    if block.cache is not None:
        block.cache.fill(block.rank, block.rope, operands, results, settings)
        absorbed.append(f"cache of {'latents' if settings['cache'] == 'latent' else 'keys and values'}")
    laid = output_result(block)
    if laid is None:
        return None
    results = {"o": laid, **results}
    tokens = places(block).tokens.number
    causal = 1 if mask.causal or (tokens == 1 and mask.operand is None and not mask.window) else 0
    config = MlaConfig(
        block.heads,
        block.nope,
        block.rope,
        block.value,
        block.rank,
        short(block.scale),
        rope=rope,
        causal=causal,
        window=mask.window,
        **settings,  # type: ignore[arg-type]
    )
    if config.check() is not None or not config.scale:
        return None
    explained = frozenset(block.explained | mask.nodes)
    candidate = Candidate(
        MLA,
        name,
        form,
        config,
        operands,
        parameters,
        results,
        Region([], [], []),
        one_token=tokens == 1,
        absorbed=absorbed,
        not_absorbed=[] if block.end.left is None else [replace(block.end.left, node=name)],
        notes=list(mask.notes),
        explained=explained,
        held=tuple(dict.fromkeys(filter(None, block.latent.held))),
    )
    candidate.region = _region(view, candidate)
    if quantized is not None:
        candidate.notes.append("kv_b stays quantized: its DequantizeLinear feeds the fused node")
    return candidate


def _region(view: GraphView, candidate: Candidate) -> Region:
    given = set(candidate.input_values())
    return backward(view, candidate.output_values(), lambda v: v in given)


def _constant_rows(width: int) -> Callable[[Sequence[np.ndarray]], np.ndarray]:
    def compute(arrays: Sequence[np.ndarray]) -> np.ndarray:
        return arrays[0].reshape(1, -1, width)

    return compute


def _weights(block: Block, parameters: dict[str, Parameter]) -> None:
    """kv_b_weight [R, H*(Dn+Dv)], each head key | value."""
    heads, nope, value, rank, order = block.heads, block.nope, block.value, block.rank, block.order
    sources = tuple(w for w, _ in block.weights)
    flips = [t for _, t in block.weights]
    noise = 0.3 / rank**0.5
    shape = (rank, heads * (nope + value))
    if order == "heads" and not flips[0]:
        parameters["kv_b_weight"] = Parameter(sources, None, noise=noise)
        return

    if block.compute is not None:
        parameters["kv_b_weight"] = Parameter(sources, block.compute, noise=noise, shape=shape, form=order)
        return

    def compute(arrays: Sequence[np.ndarray]) -> np.ndarray:
        plain = [a.T if t else a for a, t in zip(arrays, flips, strict=True)]
        if order == "heads":
            return plain[0]
        key, val = plain if order == "split" else (plain[0][:, : heads * nope], plain[0][:, heads * nope :])
        parts = [key.reshape(rank, heads, nope), val.reshape(rank, heads, value)]
        return np.concatenate(parts, axis=-1).reshape(shape)

    parameters["kv_b_weight"] = Parameter(sources, compute, noise=noise, shape=shape, form=f"{order} {flips}")


def short(value: float) -> float:
    """A float32's shortest decimal."""
    return float(str(np.float32(value)))
