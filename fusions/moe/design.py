"""The router and the tokens of a proof: ties that are exact, and no near-ties.

An original computes its logits in float32 and the op in float64, so a token whose best choices nearly tie may go to
another expert without anything being wrong. Here nothing nearly ties. Router weights and tokens are small multiples of
powers of two, so that every logit is exact in either arithmetic: experts with equal weights and biases tie exactly,
and all others differ. Tokens of which some choice is closer to another than rounding are drawn again.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ...custom_ops.moe.reference import largest, route
from ...custom_ops.moe.spec import MoeConfig

#: Choices that differ by less than this, relative to what they are made of, are drawn again.
MARGIN = 3e-5
#: Channels that steer the router: all logits up or down, favourites, groups.
SHIFT, FAVOURITES, GROUPS = 0, 1, 2
STEERING = 3


@dataclass(frozen=True)
class Design:
    """A router: ``weight`` [E, D], ``bias`` of the logits [E], ``choice_bias`` [E]; all float32."""

    weight: np.ndarray
    bias: np.ndarray
    choice_bias: np.ndarray

    def logits(self, config: MoeConfig, x: np.ndarray) -> np.ndarray:
        """Exact logits in float64."""
        logits = x.astype(np.float64) @ self.weight.astype(np.float64).T
        return logits + self.bias if config.has_router_bias else logits


def quiet_channels(config: MoeConfig) -> int:
    """How many of the last channels the router does not look at: what they hold changes experts' results only."""
    return config.hidden_size // 4 if config.hidden_size >= 2 * STEERING else 0


def design(config: MoeConfig, seed: int = 0) -> Design:
    """A router with ties: some experts are twins, within a group and across groups."""
    experts, hidden = config.num_experts, config.hidden_size
    rng = np.random.default_rng([seed, experts, hidden, config.n_group])
    heard = hidden - quiet_channels(config)
    weight = np.zeros((experts, hidden))
    weight[:, :heard] = np.round(rng.standard_normal((experts, heard)) * 1.5 / np.sqrt(heard) * 256) / 256
    bias = np.round(rng.standard_normal(experts) * 16) / 64
    # mostly negative: where scores are low, a mask of 0 beats what stays
    spread = 0.2 if experts <= 32 else 0.05  # of many experts, all should have a chance
    choice_bias = np.round((rng.standard_normal(experts) * spread - 0.25) * 1024) / 1024
    if heard > STEERING + 1:
        per_group = experts // config.n_group
        group = np.arange(experts) // per_group
        weight[:, SHIFT] = 1.0
        kept = np.isin(group, rng.permutation(config.n_group)[: config.topk_group])
        favourites = rng.permutation(np.flatnonzero(kept))[: config.top_k]
        weight[:, FAVOURITES] = -1.0
        weight[favourites, FAVOURITES] = 1.0
        weight[:, GROUPS] = (rng.permutation(config.n_group)[group] - config.n_group // 2) / 4.0
    twins = np.arange(experts)
    twins[1::4] = twins[0 : experts - 1 : 4]
    half = experts // 2
    twins[half::3] = twins[0 : experts - half : 3]
    return Design(
        weight[twins].astype(np.float32), bias[twins].astype(np.float32), choice_bias[twins].astype(np.float32)
    )


def is_clear(config: MoeConfig, made: Design, logits: np.ndarray) -> np.ndarray:
    """For each token: is every decision either an exact tie or clear?"""
    with np.errstate(over="ignore"):
        if config.score_function == "sigmoid":
            scores = 1.0 / (1.0 + np.exp(-logits))
        else:
            raised = np.exp(logits - logits.max(axis=-1, keepdims=True))
            scores = raised / raised.sum(axis=-1, keepdims=True)
        if config.choose_by_logits:
            scores = logits
    choice = scores + made.choice_bias if config.has_expert_bias else scores
    size = np.abs(scores) + (np.abs(made.choice_bias) if config.has_expert_bias else 0.0)
    clear = np.ones(len(choice), bool)
    if config.topk_group < config.n_group:
        by_group = choice.reshape(len(choice), config.n_group, -1)
        best = -np.sort(-by_group, axis=-1)[..., : config.group_top]
        order = np.take_along_axis(size.reshape(by_group.shape), largest(by_group, config.group_top), axis=-1).sum(
            axis=-1
        )
        totals = best.sum(axis=-1)
        # groups with the same choices tie in any arithmetic
        clear &= _decided(totals, order, config.topk_group)
        stays = np.zeros(totals.shape, bool)
        np.put_along_axis(stays, largest(totals, config.topk_group), True, axis=-1)
        wide = np.repeat(stays, config.num_experts // config.n_group, axis=-1)
        fill = -np.inf if config.masked_score == "-inf" else 0.0
        choice = np.where(wide, choice, fill)
        size = np.where(wide, size, 0.0)
    return clear & _decided(choice, size, config.top_k)


def _decided(values: np.ndarray, size: np.ndarray, count: int) -> np.ndarray:
    """Is the border between the ``count`` largest and the rest clear, or an exact tie?"""
    if count >= values.shape[-1]:
        return np.ones(len(values), bool)
    order = largest(values, count + 1)
    border = np.take_along_axis(values, order, axis=-1)[:, -2:]
    scale = np.take_along_axis(size, order, axis=-1)[:, -2:].max(axis=-1)
    with np.errstate(invalid="ignore"):
        gap = np.where(border[:, 0] == border[:, 1], 0.0, border[:, 0] - border[:, 1])
    # others may lie as near to the border as the next one does
    with np.errstate(invalid="ignore"):
        near = np.abs(values - border[:, :1]) <= MARGIN * np.maximum(scale, 1e-30)[:, None]
    exact = values == border[:, :1]
    return ((gap == 0.0) | (gap > MARGIN * scale)) & np.all(~near | exact, axis=-1)


def tokens(config: MoeConfig, made: Design, count: int, rng: np.random.Generator, case: str) -> np.ndarray:
    """Tokens ``[count, D]`` of which every decision is clear."""
    x = _draw(config, count, rng, case)
    for _ in range(20):
        unclear = np.flatnonzero(~is_clear(config, made, made.logits(config, x)))
        if not len(unclear):
            return x
        x[unclear] = _draw(config, count, rng, case)[unclear]
    good = np.flatnonzero(is_clear(config, made, made.logits(config, x)))
    if len(good):
        x[unclear] = x[good[np.arange(len(unclear)) % len(good)]]
    else:
        x[unclear] = 0.0  # all logits equal, or the bias: an exact tie at most
    return x


@lru_cache(maxsize=8)
def cover(config: MoeConfig) -> np.ndarray:
    """Tokens ``[n, D]`` that between them choose every expert which any of a large pool chooses."""
    made, rng = design(config), np.random.default_rng(7)
    count = min(1024, max(256, 4 * config.num_experts))
    x = np.concatenate([tokens(config, made, count, rng, case) for case in ("normal", "groups", "one expert")])
    # and some that one expert's row points at
    rows = made.weight.astype(np.float64).copy()
    rows[:, :STEERING] = 0.0
    length = np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-9)
    for reach in (2.0, 3.0, 4.0, 5.0, 6.0, 7.0):
        towards = np.round(rows / length * reach * 4) / 4 + np.round(rng.standard_normal(rows.shape)) / 4
        x = np.concatenate([x, towards[is_clear(config, made, made.logits(config, towards))]])
    inputs = {
        "router_weight": made.weight,
        "router_logits": made.logits(config, x),
        "router_bias": made.bias,
        "expert_bias": made.choice_bias,
    }
    chosen = np.zeros((len(x), config.num_experts), bool)
    np.put_along_axis(chosen, route(config, x, inputs).ids, True, axis=1)
    missing, order = chosen.any(axis=0), []
    while missing.any():
        best = int(np.argmax((chosen & missing).sum(axis=1)))
        order.append(best)
        missing &= ~chosen[best]
    return x[order]


def _draw(config: MoeConfig, count: int, rng: np.random.Generator, case: str) -> np.ndarray:
    hidden = config.hidden_size
    quiet = quiet_channels(config)
    x = np.round(rng.standard_normal((count, hidden)) * 4) / 4
    steered = hidden - quiet > STEERING + 1
    if steered:
        x[:, :STEERING] = 0.0
    if case in ("large", "small") and quiet:
        x[:, hidden - quiet :] *= 64.0 if case == "large" else 1.0 / 64
    if case == "small":
        x[:, : hidden - quiet] /= 16.0
    if steered and case == "low":
        x[:, SHIFT] = -6.0
    elif steered and case == "high":
        x[:, SHIFT] = 5.0
    elif steered and case == "saturated":
        x[:, SHIFT] = 64.0
    elif steered and case == "one expert":
        x[:, FAVOURITES] = 4.0
        x[:, STEERING : hidden - quiet] /= 8.0
    elif steered and case == "groups":
        x[:, GROUPS] = rng.choice([-8.0, -2.0, 2.0, 8.0], count)
    elif case == "zeros":
        x[::2] = 0.0
    return x
