"""The op in float64 NumPy, expert by expert: the truth that the body and the kernels are checked against.

Selection is exact: float32 roundings of float64 logits and scores, float32 sums, the lower index of equal numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import erf
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .packing import STORED, unpack
from .spec import TOLERANCES, MoeConfig

Array = NDArray[Any]
Float64 = NDArray[np.float64]


@dataclass(frozen=True)
class Routing:
    """Which experts each token goes to.

    Attributes:
        scores: float32 ``[N, E]``.
        ids: int64 ``[N, k]``, best choice first.
        weights: float64 ``[N, k]``.
    """

    scores: NDArray[np.float32]
    ids: NDArray[np.int64]
    weights: Float64


def sigmoid(x: Float64) -> Float64:
    """1 / (1 + exp(-x)): full relative accuracy at both ends, 0 and 1 beyond them."""
    with np.errstate(over="ignore"):
        return 1.0 / (1.0 + np.exp(-x))


def largest(values: Array, count: int) -> NDArray[np.int64]:
    """Indices of the ``count`` largest along the last axis, largest first; of equal numbers the lower index."""
    return np.argsort(-values, axis=-1, kind="stable")[..., :count].astype(np.int64)


def router_logits(config: MoeConfig, x: Array, inputs: Mapping[str, Array]) -> NDArray[np.float32]:
    """Float32 logits ``[N, E]`` of tokens ``[N, D]``."""
    if config.has_router_weight:
        logits = x.astype(np.float64) @ inputs["router_weight"].astype(np.float64).T
    else:
        logits = inputs["router_logits"].astype(np.float64).reshape(-1, config.num_experts)
    if config.has_router_bias:
        logits = logits + inputs["router_bias"].astype(np.float64)
    return logits.astype(np.float32)


def router_scores(config: MoeConfig, logits: NDArray[np.float32]) -> NDArray[np.float32]:
    """Float32 scores of float32 logits ``[N, E]``."""
    wide = logits.astype(np.float64)
    if config.score_function == "sigmoid":
        return sigmoid(wide).astype(np.float32)
    raised = np.exp(wide - np.max(wide, axis=-1, keepdims=True))
    return (raised / np.sum(raised, axis=-1, keepdims=True)).astype(np.float32)


def _nan_is_lowest(values: NDArray[np.float32]) -> NDArray[np.float32]:
    return np.where(np.isnan(values), np.float32(-np.inf), values)


def route(config: MoeConfig, x: Array, inputs: Mapping[str, Array]) -> Routing:
    """Choose experts for tokens ``[N, D]``."""
    experts, groups = config.num_experts, config.n_group
    with np.errstate(all="ignore"):
        logits = router_logits(config, x, inputs)
        scores = router_scores(config, logits)
        choice = logits if config.choose_by_logits else scores
        choice = choice + inputs["expert_bias"].astype(np.float32) if config.has_expert_bias else choice
        choice = _nan_is_lowest(choice)
        stays = np.ones(choice.shape, bool)
        if config.topk_group < groups:
            by_group = choice.reshape(-1, groups, experts // groups)
            best = -np.sort(-by_group, axis=-1)
            total = best[..., 0]
            for place in range(1, config.group_top):
                total = total + best[..., place]
            kept = np.zeros(total.shape, bool)
            np.put_along_axis(kept, largest(_nan_is_lowest(total), config.topk_group), True, axis=-1)
            stays = np.repeat(kept, experts // groups, axis=-1)
            choice = np.where(stays, choice, np.float32(config.masked_score))
        ids = largest(choice, config.top_k)
        weights = np.take_along_axis(scores, ids, axis=-1).astype(np.float64)
        if config.masked_weights:
            weights = np.where(np.take_along_axis(stays, ids, axis=-1), weights, 0.0)
        if config.norm_topk_prob:
            total = np.sum(weights, axis=-1, keepdims=True) + config.norm_eps
            weights = weights / (np.maximum(total, config.norm_min) if config.norm_min else total)
    return Routing(scores, ids, weights * config.routed_scaling_factor)


def dequantize(
    weight: Array, scale: Array | None = None, zero_point: Array | None = None, block_size: int = 0, block_rows: int = 1
) -> Float64:
    """The numbers that stored weights ``[.., rows, cols]`` stand for.

    Args:
        weight: plain floats, or stored numbers, not packed.
        scale, zero_point: ``[.., ceil(rows / block_rows), ceil(cols / block_size)]``.
        block_size: columns that share a scale; 0: all of a row.
        block_rows: rows that share a scale.
    """
    value = weight.astype(np.float64)
    if scale is None:
        return value
    rows, cols = value.shape[-2:]

    def spread(of_blocks: Array) -> Float64:
        wide = np.repeat(of_blocks.astype(np.float64), block_size or cols, axis=-1)[..., :cols]
        return np.repeat(wide, block_rows, axis=-2)[..., :rows, :]

    if zero_point is not None:
        value = value - spread(zero_point)
    return value * spread(scale)


def matrix(config: MoeConfig, inputs: Mapping[str, Array], name: str, index: Any = slice(None)) -> Float64:
    """The float64 weights ``name`` (such as ``"shared_down"``), or those of one expert."""
    kind, (block_size, block_rows), _ = config.weights_form(name)
    stored = inputs[f"{name}_weight"][index]
    scale, zero = inputs.get(f"{name}_scale"), inputs.get(f"{name}_zero_point")
    return dequantize(
        unpack(stored, kind) if kind in STORED else stored,
        None if scale is None else scale[index],
        None if zero is None else zero[index],
        block_size,
        block_rows,
    )


_erf = np.vectorize(erf, otypes=[np.float64])


def activate(kind: str, x: Float64, alpha: float = 1.0) -> Float64:
    """The activation ``kind`` of spec.ACTIVATIONS."""
    if kind == "silu":
        return x * sigmoid(alpha * x)
    if kind == "relu2":
        return np.maximum(x, 0.0) ** 2
    if kind == "gelu":
        return x * 0.5 * (1.0 + _erf(x / np.sqrt(2.0))) if x.size else x
    return x * 0.5 * (1.0 + np.tanh(np.sqrt(2.0 / np.pi) * (x + 0.044715 * x**3)))


def hidden(config: MoeConfig, mixed: Float64) -> Float64:
    """What the down projection sees: ``[N, I]`` from ``[N, G*I]`` outputs of the first half."""
    if not config.gated:
        return activate(config.activation, mixed, config.activation_alpha)
    gate, up = np.split(mixed, 2, axis=-1)
    if config.clamp == "before":
        gate = np.minimum(gate, config.gate_limit)
    gate = activate(config.activation, gate, config.activation_alpha)
    if config.clamp == "after":
        gate = np.minimum(gate, config.gate_limit)
    if config.clamp != "none":
        up = np.clip(up, -config.up_limit, config.up_limit)
    return gate * (up + config.up_offset)


def expert(config: MoeConfig, x: Float64, inputs: Mapping[str, Array], prefix: str, index: Any) -> Float64:
    """One expert's output for ``[N, D]``: ``prefix`` is "" or "shared_", ``index`` the expert's, ``...`` for that."""
    mixed = x @ matrix(config, inputs, f"{prefix}gate_up", index).T
    if f"{prefix}gate_up_bias" in inputs:
        mixed = mixed + inputs[f"{prefix}gate_up_bias"][index].astype(np.float64)
    y = hidden(config, mixed) @ matrix(config, inputs, f"{prefix}down", index).T
    return y + inputs[f"{prefix}down_bias"][index].astype(np.float64) if f"{prefix}down_bias" in inputs else y


def reference(config: MoeConfig, inputs: Mapping[str, Array]) -> dict[str, Array]:
    """The op's outputs: y float64 in the shape of x, expert_ids int64 and expert_weights float64 ``[N, k]``.

    Args:
        config: the call.
        inputs: an array for each of ``config.input_names()``, in the types of the spec (ml_dtypes where NumPy has
            none).
    """
    stored = inputs["x"]
    x = stored.reshape(-1, config.hidden_size)
    routing = route(config, x, inputs)
    wide = x.astype(np.float64)
    y = np.zeros(wide.shape)
    for index in np.unique(routing.ids):
        tokens, places = np.nonzero(routing.ids == index)
        part = wide[tokens]
        if index < config.own_experts:
            part = expert(config, part, inputs, "", index)
        y[tokens] += routing.weights[tokens, places, None] * part
    if config.shared_intermediate_size:
        shared = expert(config, wide, inputs, "shared_", ...)
        if config.has_shared_gate:
            shared = shared * sigmoid(wide @ inputs["shared_gate_weight"].astype(np.float64).T)
        y = y + shared
    return {"y": y.reshape(stored.shape), "expert_ids": routing.ids, "expert_weights": routing.weights}


def relative_error(result: Array, truth: Array) -> float:
    """Relative L2 norm of the difference; NaN where one has a NaN and the other has not."""
    wide, true = np.asarray(result, np.float64), np.asarray(truth, np.float64)
    bad = ~np.isfinite(true)
    if not np.array_equal(bad, ~np.isfinite(wide)):
        return float("nan")
    norm = float(np.linalg.norm(true[~bad]))
    difference = float(np.linalg.norm(wide[~bad] - true[~bad]))
    return difference / norm if norm else difference


def tolerance(kind: str, dtype: str) -> float:
    """What :func:`relative_error` may be: ``kind`` and ``dtype`` as in ``spec.TOLERANCES``."""
    return TOLERANCES[kind][dtype]
