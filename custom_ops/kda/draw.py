"""Random and hostile inputs for the op: shared by the tests, the CUDA checks and the proofs."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from .spec import KdaConfig

Array = NDArray[Any]

#: What :func:`draw_inputs` can draw. ``collinear-slow`` is the numerically hard one (tolerances: ``hard_factor``).
CASES = (
    "normal",
    "gate-near-zero",  # log decay about -1e-3: nothing is forgotten
    "gate-near-bound",  # log decay about -5, or lower_bound
    "gate-unbounded",  # both extremes in one sequence: log decays from 0 to the bound, or to -100 and below
    "collinear-slow",  # keys close to one direction, slow decay, beta near 1
    "tiny-keys",  # head norms near sqrt(eps), or eps for "max": where the eps of the L2 norm matters
    "zero-state",
    "full-state",  # a large initial state
    "ragged",  # with cu_seqlens: empty sequences and sequences of one token
)

DTYPES: dict[str, Any] = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def _log_decays(config: KdaConfig, shape: tuple[int, ...], rng: np.random.Generator, case: str) -> Array:
    """Log decays that the case asks for, of any sign <= 0."""
    deepest = config.lower_bound if config.gate_activation == "sigmoid" else -5.0
    if case in ("gate-near-zero", "collinear-slow"):
        return -1e-3 * rng.uniform(0.05, 1.0, shape)
    if case == "gate-near-bound":
        return deepest * (1 - 1e-2 * rng.uniform(0.05, 1.0, shape))
    if case == "gate-unbounded":
        kind = rng.integers(0, 3, shape)
        deep = deepest * (1 - 1e-4) if config.gate_activation == "sigmoid" else -rng.uniform(20.0, 300.0, shape)
        slow, middle = -1e-3 * rng.uniform(0.05, 1.0, shape), -rng.uniform(0.1, 4.0, shape)
        return np.select([kind == 0, kind == 1], [slow, deep], middle)
    return deepest / (1.0 + np.exp(-rng.normal(-2.0, 1.5, shape)))


def _gate_inputs(config: KdaConfig, decay: Array, a_log: Array, dt_bias: Array | None) -> Array:
    """Pre-activations whose log decay is ``decay`` ``[B, S, HV, K]``."""
    rate = np.exp(a_log).reshape(-1, 1)
    if config.gate_activation == "softplus":
        y = -decay / rate
        x = np.where(y > 30.0, y, np.log(np.expm1(np.minimum(y, 30.0))))
    elif config.gate_activation == "sigmoid":
        share = decay / config.lower_bound
        x = (np.log(share) - np.log1p(-share)) / rate
    else:
        x = decay
    return x if dt_bias is None or config.gate_activation == "none" else x - dt_bias.reshape(decay.shape[-2:])


def _lengths(sequences: int, tokens: int, rng: np.random.Generator, case: str) -> Array:
    """Prefix sums of ``sequences`` lengths that add up to ``tokens``."""
    cuts = rng.integers(0, tokens + 1, sequences - 1)
    if case == "ragged" and sequences >= 3:
        cuts[0] = 0  # the first sequence is empty
        cuts[-1] = cuts[0] + min(1, tokens)  # and one has one token
    return np.concatenate([[0], np.sort(cuts), [tokens]])


def _eps_length(config: KdaConfig) -> float:
    """The length of a vector at which the L2 norm's epsilon counts as much as the vector does."""
    return config.l2norm_eps if config.qk_l2norm == "max" else float(np.sqrt(config.l2norm_eps))


def draw_inputs(
    config: KdaConfig,
    batch: int,
    seq_len: int,
    rng: np.random.Generator,
    case: str = "normal",
    dtype: str = "float32",
    state_dtype: str = "float32",
    index_dtype: str = "int64",
) -> dict[str, Array]:
    """Draw the operands that ``config.input_names()`` names.

    Args:
        config: the call.
        batch: B; with ``cu_seqlens`` the number of sequences N (B is 1 then).
        seq_len: tokens in a row of the batch; with ``cu_seqlens`` the total over all sequences.
        rng: where randomness comes from; equal generators give equal inputs.
        case: one of :data:`CASES`.
        dtype: element type of T. state_dtype: of TS. index_dtype: of ``cu_seqlens``.

    Raises:
        ValueError: an unknown case.
    """
    if case not in CASES:
        raise ValueError(f"unknown case {case!r}: one of {', '.join(CASES)}")
    heads, v_heads, key_dim, value_dim = config.num_heads, config.num_v_heads, config.head_dim, config.head_v_dim
    rows = 1 if config.has_cu_seqlens else batch
    lead = (rows, seq_len)

    q = rng.standard_normal((*lead, heads, key_dim))
    k = rng.standard_normal((*lead, heads, key_dim))
    v = rng.standard_normal((*lead, v_heads, value_dim))
    if case == "collinear-slow":
        direction = rng.standard_normal((heads, key_dim))
        if config.conv_width and config.conv_activation == "silu":
            direction = np.abs(direction) + 0.5  # SiLU would crush the negative half
        q, k = (direction + 0.05 * y for y in (q, k))
    if config.qk_l2norm == "none":
        # keys longer than 1 make the recurrence itself unstable, whatever computes it
        q, k = (y / np.sqrt(np.sum(y * y, axis=-1, keepdims=True)) for y in (q, k))
    elif case == "tiny-keys":
        q, k = (y * (_eps_length(config) / np.sqrt(key_dim)) * rng.uniform(0.3, 3.0, (*lead, heads, 1)) for y in (q, k))
    values: dict[str, Array] = {
        name: y.reshape(*lead, y.shape[2] * y.shape[3]) for name, y in (("q", q), ("k", k), ("v", v))
    }
    if config.packed_qkv:
        values = {"q": np.concatenate([values["q"], values["k"], values["v"]], axis=-1)}

    a_log = rng.uniform(-1.0, 1.0, v_heads)
    dt_bias = rng.uniform(-1.0, 1.0, v_heads * key_dim)
    if config.gate_activation == "none":
        dt_bias = -np.abs(dt_bias) * 1e-3  # it is added to the log decay itself, which must stay negative
    values["A_log"] = a_log
    values["dt_bias"] = dt_bias
    decay = _log_decays(config, (*lead, v_heads, key_dim), rng, case)
    values["g"] = _gate_inputs(config, decay, a_log, dt_bias if config.has_dt_bias else None)
    values["g"] = values["g"].reshape(*lead, v_heads * key_dim)
    if config.beta_activation == "sigmoid":
        values["beta"] = rng.normal(4.0 if case == "collinear-slow" else 0.0, 1.5, (*lead, v_heads))
    else:
        values["beta"] = rng.uniform(0.9 if case == "collinear-slow" else 0.02, 0.999, (*lead, v_heads))

    if config.conv_width:
        channels, width = config.conv_channels, config.conv_width
        weight = rng.standard_normal((channels, 1, width)) / np.sqrt(width)
        if case == "collinear-slow":
            weight = np.abs(weight)
        if config.qk_l2norm == "none":
            weight /= np.sum(np.abs(weight), axis=-1, keepdims=True)
        values["conv_weight"] = weight
        size = _eps_length(config) if case == "tiny-keys" else 0.0 if config.qk_l2norm == "none" else 0.1
        values["conv_bias"] = size * rng.standard_normal(channels)
        past = rng.standard_normal((batch, channels, max(config.conv_state_width, 1)))
        # as small as the keys themselves, or the norms behind the convolution would leave their epsilon's reach
        tiny = _eps_length(config) * 0.3 / np.sqrt(key_dim)
        values["conv_state"] = past * (tiny if case == "tiny-keys" else 0.1 if config.qk_l2norm == "none" else 1.0)
    state_size = {"zero-state": 0.0, "full-state": 20.0}.get(case, 1.0)
    layout = (key_dim, value_dim) if config.state_layout == "KV" else (value_dim, key_dim)
    values["initial_state"] = state_size * rng.standard_normal((batch, v_heads, *layout))
    values["norm_weight"] = rng.uniform(0.5, 1.5, value_dim)
    values["gate"] = rng.normal(0.0, 2.0, (*lead, v_heads * value_dim))
    values["cu_seqlens"] = _lengths(batch, seq_len, rng, case)

    own = {"initial_state": DTYPES[state_dtype], "cu_seqlens": np.dtype(index_dtype)}
    own.update(dict.fromkeys(("A_log", "dt_bias", "conv_weight", "conv_bias", "norm_weight"), np.float32))
    return {name: values[name].astype(own.get(name, DTYPES[dtype])) for name in config.input_names()}
