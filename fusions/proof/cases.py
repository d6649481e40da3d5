"""Inputs of a proof: the op's operands drawn, then laid out as the region's own values."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import onnx_ir as ir

from ...custom_ops.kda.draw import draw_inputs
from ...custom_ops.kda.spec import KdaConfig
from ..candidate import Candidate, Operand, Piece
from .dims import concrete, symbol

Arrays = dict[str, np.ndarray]
Shapes = Callable[[ir.Value], list[int]]

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


def raw_feeds(
    candidate: Candidate, operands: Arrays, env: Mapping[str, int], shapes: Mapping[ir.Value, list[int]] | None = None
) -> Arrays:
    """The region's input values for the op's operands: the candidate's layout undone.

    Args:
        shapes: the inputs' shapes where they are not the graph's own (a region cut down to fewer heads).

    Raises:
        UnknownDim: a piece whose shape is not known.
        ValueError: two operands that ask one value for different contents.
    """
    feeds: dict[str, np.ndarray] = {}

    def shape(value: ir.Value) -> list[int]:
        return shapes[value] if shapes is not None else concrete(value, env)

    for name, operand in candidate.operands.items():
        for piece, array in zip(operand.pieces, _parts(operand, operands[name], shape), strict=True):
            raw = np.ascontiguousarray(_undo(piece, array, shape), np.float32)
            key = piece.value.name or ""
            if key in feeds and not np.array_equal(feeds[key], raw):
                raise ValueError(f"two operands read {key!r}")
            feeds[key] = raw
    return feeds


def _parts(operand: Operand, array: np.ndarray, shape: Shapes) -> list[np.ndarray]:
    if len(operand.pieces) == 1:
        return [array]
    sizes = [shape(p.value)[operand.axis] for p in operand.pieces]
    return np.split(array, np.cumsum(sizes)[:-1], axis=operand.axis)


def _undo(piece: Piece, array: np.ndarray, shape: Shapes) -> np.ndarray:
    if piece.reshape is None and piece.permutation is None:
        return array
    if piece.reshape is not None:
        raw = shape(piece.value)
        moved = raw if piece.permutation is None else [raw[i] for i in piece.permutation]
        array = array.reshape(moved)
    if piece.permutation is not None:
        array = np.transpose(array, np.argsort(piece.permutation))
    return array


def rows_and_tokens(candidate: Candidate) -> tuple[int | str | None, int | str | None]:
    """Batch and tokens of the block: numbers where frozen, symbols where dynamic, None where unnamed."""
    found: list[int | str | None] = [None, None]
    for name in ("beta", "g", "q", "v"):
        piece = candidate.operands[name].pieces[0] if name in candidate.operands else None
        if piece is None or piece.value.shape is None:
            continue
        dims = list(piece.value.shape)
        order = list(piece.permutation) if piece.permutation is not None else list(range(len(dims)))
        if piece.adds_time:
            found[1], order = 1, order[:1]
        for i, axis in enumerate(list(order)[:2]):
            dim = dims[axis]
            if isinstance(dim, int):
                found[i] = dim
            elif found[i] is None and dim.value is not None:
                found[i] = str(dim.value)
    return found[0], found[1]


def environment(candidate: Candidate, batch: int, tokens: int) -> dict[str, int]:
    """Numbers for the symbols of batch and tokens."""
    rows, length = rows_and_tokens(candidate)
    env: dict[str, int] = {}
    if isinstance(rows, str):
        env[rows] = batch
    if isinstance(length, str):
        env[length] = tokens
    for operand in candidate.operands.values():  # one size has several symbols where shapes were inferred
        for piece in operand.pieces:
            if piece.value.shape is None:
                continue
            order = list(piece.permutation) if piece.permutation is not None else list(range(len(piece.value.shape)))
            sizes = (
                (batch,) if piece.adds_time or operand is candidate.operands.get("initial_state") else (batch, tokens)
            )
            for axis, size in zip(order, sizes, strict=False):
                name = symbol(piece.value.shape[axis])
                if name is not None and name.isidentifier():
                    env.setdefault(name, size)
    if "conv_state" in candidate.operands:
        for piece in candidate.operands["conv_state"].pieces:
            columns = None if piece.value.shape is None else symbol(piece.value.shape[-1])
            if columns is not None and columns not in env:
                env[columns] = candidate.config.conv_state_width
    return env


def value_names(values: list[ir.Value]) -> list[str]:
    return [v.name or "" for v in values]
