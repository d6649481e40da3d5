"""Hostile operands for proofs of KDA."""

from __future__ import annotations

import numpy as np

from ...custom_ops.kda.draw import draw_inputs
from ...custom_ops.kda.spec import KdaConfig

Arrays = dict[str, np.ndarray]

#: Cases beside those of ``draw_inputs``: "tiny-values" brings the norms' epsilons and the scale to light, "wide" draws
#: over many orders of magnitude, "extreme-last" lets the last token be anything, "padded" has rows of zeros at the end,
#: as masked positions leave them.
HOSTILE = (
    "normal",
    "gate-near-zero",
    "gate-near-bound",
    "gate-unbounded",
    "collinear-slow",
    "tiny-keys",
    "tiny-values",
    "wide",
    "extreme-last",
    "zero-state",
    "full-state",
    "padded",
)


def draw(config: KdaConfig, batch: int, tokens: int, seed: int, case: str) -> Arrays:
    """Operands of the op for one case, float32, parameters not among them."""
    rng = np.random.default_rng(seed)
    known = case if case not in ("tiny-values", "wide", "extreme-last", "padded") else "normal"
    drawn = draw_inputs(config, batch, tokens, rng, known)
    _leave_the_domain(config, drawn, rng)
    if case == "wide":
        _widen(config, drawn, rng)
    elif case == "extreme-last":
        _last_token_to_extremes(drawn, rng)
    elif case == "tiny-values":
        _scale_values(config, drawn, 3e-3)
    elif case == "padded":
        for name in ("q", "k", "v", "g", "beta", "gate"):
            if name in drawn and drawn[name].shape[1] > 1:
                drawn[name][:, -(drawn[name].shape[1] // 3 + 1) :] = 0.0
    return drawn


def _leave_the_domain(config: KdaConfig, drawn: Arrays, rng: np.random.Generator) -> None:
    """Draw from a set of full dimension.

    Keys of length one, rates between 0 and 1 and decays below 0 are what a *right* graph hands to the recurrence. A
    graph that still normalises or clamps inside the region would be the identity on them, and look right.
    """
    if config.qk_l2norm == "none" and not config.conv_width:
        for name, low, high in (("q", 0.3, 3.0), ("k", 0.6, 1.25)):
            if name in drawn:
                heads = drawn[name].reshape(*drawn[name].shape[:2], config.num_heads, config.head_dim)
                lengths = rng.uniform(low, high, (*heads.shape[:3], 1))
                drawn[name] = (heads * lengths).reshape(drawn[name].shape).astype(drawn[name].dtype)
    if config.beta_activation == "none":
        # up to a rate at which the recurrence still contracts
        drawn["beta"] = rng.uniform(-0.05, 1.1, drawn["beta"].shape).astype(drawn["beta"].dtype)
    if config.gate_activation == "none":
        rises = rng.random(drawn["g"].shape) < 0.05
        drawn["g"] = np.where(rises, rng.uniform(0.0, 0.05, drawn["g"].shape), drawn["g"]).astype(drawn["g"].dtype)


def _widen(config: KdaConfig, drawn: Arrays, rng: np.random.Generator) -> None:
    """Spread magnitudes over several orders where the recurrence stays finite."""
    heavy = {"v": 6.0, "gate": 1.0, "initial_state": 4.0}
    if config.qk_l2norm != "none":
        heavy |= {"q": 5.0, "k": 5.0}
    if config.gate_activation != "none":
        heavy["g"] = 1.0
    if config.beta_activation == "sigmoid":
        heavy["beta"] = 1.0
    for name, orders in heavy.items():
        if name in drawn:
            drawn[name] = (drawn[name] * 10.0 ** rng.uniform(-1.0, orders, drawn[name].shape)).astype(drawn[name].dtype)


def _last_token_to_extremes(drawn: Arrays, rng: np.random.Generator) -> None:
    """Let the last token's operands be anything: no later one can make the recurrence blow up.

    Clamps and switches that no ordinary value reaches come to light, also where nothing bounds an operand.
    """
    for name in ("q", "k", "v", "g", "beta", "gate"):
        if name in drawn:
            last = drawn[name][:, -1:]
            spread = last * 10.0 ** rng.uniform(0.0, 2.5, last.shape)
            if name == "g":
                spread = np.minimum(spread, 20.0)  # exp of a raw log decay stays in range
            drawn[name][:, -1:] = spread


def _scale_values(config: KdaConfig, drawn: Arrays, factor: float) -> None:
    """Make v and the initial state small, so that outputs are near the square root of the norm's epsilon."""
    start = 2 * config.num_heads * config.head_dim
    if "v" in drawn:
        drawn["v"] *= factor
    else:
        drawn["q"][..., start:] *= factor
    if "conv_state" in drawn:
        drawn["conv_state"][:, start:] *= factor
    if "initial_state" in drawn:
        drawn["initial_state"] *= factor
