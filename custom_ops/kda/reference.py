"""The op in float64 NumPy, token by token: the truth that the body and the kernels are checked against."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .spec import TOLERANCES, KdaConfig

Array = NDArray[Any]
Float64 = NDArray[np.float64]


def sigmoid(x: Float64) -> Float64:
    """1 / (1 + exp(-x)) with full relative accuracy at both ends."""
    return np.exp(-np.logaddexp(0.0, -x))


def silu(x: Float64) -> Float64:
    return x * sigmoid(x)


def softplus(x: Float64) -> Float64:
    """log(1 + exp(x)) without overflow."""
    return np.logaddexp(0.0, x)


def l2_normalise(x: Float64, kind: str, eps: float) -> Float64:
    """Scale the vectors along the last axis as ``qk_l2norm`` says."""
    if kind == "none":
        return x
    total = np.sum(x * x, axis=-1, keepdims=True)
    return x / (np.sqrt(total + eps) if kind == "sum" else np.maximum(np.sqrt(total), eps))


def log_decay(config: KdaConfig, g: Float64, a_log: Float64 | None, dt_bias: Float64 | None) -> Float64:
    """Log decay of ``[..., HV, K]`` gate pre-activations."""
    shape = (config.num_v_heads, config.head_dim)
    x = g if dt_bias is None else g + dt_bias.reshape(shape)
    if config.gate_activation == "none":
        return x
    assert a_log is not None
    rate = np.exp(a_log).reshape(-1, 1)
    if config.gate_activation == "softplus":
        return -rate * softplus(x)
    return config.lower_bound * sigmoid(rate * x)


def short_convolution(
    config: KdaConfig, x: Float64, weight: Float64, bias: Float64 | None, past: Float64 | None
) -> tuple[Float64, Float64]:
    """Causal depthwise convolution of one run of tokens, and the state after it.

    Args:
        x: ``[B, S, C]``.
        weight: ``[C, 1, W]``.
        bias: ``[C]`` or None.
        past: ``[B, C, conv_state_width]``, or None for zeros.

    Returns:
        The activated output ``[B, S, C]`` and the last ``conv_state_width`` columns of past and x, ``[B, C, .]``.
    """
    batch, tokens, channels = x.shape
    width = weight.shape[-1]
    columns = max(config.conv_state_width, width - 1)
    before = np.zeros((batch, columns, channels))
    if past is not None:
        before[:, columns - past.shape[-1] :] = past.transpose(0, 2, 1)
    line = np.concatenate([before, x], axis=1)
    out = np.zeros_like(x)
    for tap in range(width):
        start = columns - (width - 1) + tap
        out += line[:, start : start + tokens] * weight[:, 0, tap]
    if bias is not None:
        out += bias
    if config.conv_activation == "silu":
        out = silu(out)
    state = line[:, line.shape[1] - config.conv_state_width :].transpose(0, 2, 1)
    return out, state


def delta_rule(
    scale: float, q: Float64, k: Float64, v: Float64, g: Float64, beta: Float64, state: Float64
) -> tuple[Float64, Float64]:
    """The recurrence of one run of tokens.

    Args:
        q, k, g: ``[B, S, HV, K]``.  v: ``[B, S, HV, V]``.  beta: ``[B, S, HV]``.  state: ``[B, HV, K, V]``.

    Returns:
        Outputs ``[B, S, HV, V]`` and the state after the last token.
    """
    out = np.zeros_like(v)
    for t in range(q.shape[1]):
        state = state * np.exp(g[:, t])[..., None]
        read = np.einsum("bhkv,bhk->bhv", state, k[:, t])
        delta = beta[:, t, :, None] * (v[:, t] - read)
        state = state + k[:, t, :, :, None] * delta[:, :, None, :]
        out[:, t] = scale * np.einsum("bhkv,bhk->bhv", state, q[:, t])
    return out, state


def _run(config: KdaConfig, x: dict[str, Float64]) -> dict[str, Float64]:
    """One rectangular batch of sequences; ``x`` holds float64 inputs, q already packed as q | k | v."""
    heads, v_heads = config.num_heads, config.num_v_heads
    key_dim, value_dim = config.head_dim, config.head_v_dim
    qkv = x["qkv"]
    batch, tokens, _ = qkv.shape
    result: dict[str, Float64] = {}
    if config.conv_width:
        qkv, result["present_conv_state"] = short_convolution(
            config, qkv, x["conv_weight"], x.get("conv_bias"), x.get("conv_state")
        )
    q, k, v = np.split(qkv, [heads * key_dim, 2 * heads * key_dim], axis=-1)
    q = l2_normalise(q.reshape(batch, tokens, heads, key_dim), config.qk_l2norm, config.l2norm_eps)
    k = l2_normalise(k.reshape(batch, tokens, heads, key_dim), config.qk_l2norm, config.l2norm_eps)
    q, k = (np.repeat(y, v_heads // heads, axis=2) for y in (q, k))
    v = v.reshape(batch, tokens, v_heads, value_dim)
    g = log_decay(config, x["g"].reshape(batch, tokens, v_heads, key_dim), x.get("A_log"), x.get("dt_bias"))
    beta = config.beta_scale * (sigmoid(x["beta"]) if config.beta_activation == "sigmoid" else x["beta"])

    by_value = config.state_layout == "VK"
    state = x.get("initial_state", np.zeros((batch, v_heads, key_dim, value_dim)))
    if by_value and "initial_state" in x:
        state = state.swapaxes(-1, -2)
    o, state = delta_rule(config.scale, q, k, v, g, beta, state)
    if config.has_norm:
        o = o / np.sqrt(np.mean(o * o, axis=-1, keepdims=True) + config.norm_eps) * x["norm_weight"]
    o = o.reshape(batch, tokens, v_heads * value_dim)
    if config.output_gate != "none":
        o = o * (sigmoid(x["gate"]) if config.output_gate == "sigmoid" else silu(x["gate"]))
    result["o"] = o
    result["final_state"] = state.swapaxes(-1, -2) if by_value else state
    return result


def reference(config: KdaConfig, inputs: Mapping[str, Array]) -> dict[str, Float64]:
    """Run the op in float64.

    Args:
        config: what the call is; ``config.check()`` must be None.
        inputs: the operands named by ``config.input_names()``, shapes as in ``spec.INPUTS``, any float dtype.

    Returns:
        ``o`` [B, S, HV*V] and ``final_state``, and ``present_conv_state`` where there is a convolution, whether the
        configuration asks for them or not. All float64.

    Raises:
        ValueError: the configuration is not one the op defines, or an operand is missing.
    """
    refused = config.check()
    if refused is not None:
        raise ValueError(str(refused))
    missing = [name for name in config.input_names() if name not in inputs]
    if missing:
        raise ValueError(f"missing inputs: {', '.join(missing)}")
    x = {
        name: np.asarray(inputs[name]).astype(np.float64)
        for name in config.input_names()
        if name not in ("q", "k", "v", "cu_seqlens")
    }
    names = ("q",) if config.packed_qkv else ("q", "k", "v")
    x["qkv"] = np.concatenate([np.asarray(inputs[name]).astype(np.float64) for name in names], axis=-1)
    if not config.has_cu_seqlens:
        return _run(config, x)

    bounds = [int(b) for b in np.asarray(inputs["cu_seqlens"])]
    if bounds[0] != 0 or bounds[-1] != x["qkv"].shape[1] or any(b < a for a, b in pairwise(bounds)):
        raise ValueError(
            f"cu_seqlens {bounds} are not prefix sums of lengths that add up to {x['qkv'].shape[1]} tokens"
        )
    parts = []
    for n, (start, stop) in enumerate(pairwise(bounds)):
        one = dict(x)
        for name in ("qkv", "g", "beta", "gate"):
            if name in x:
                one[name] = x[name][:, start:stop]
        for name in ("conv_state", "initial_state"):
            if name in x:
                one[name] = x[name][n : n + 1]
        parts.append(_run(config, one))
    axis = {"o": 1, "present_conv_state": 0, "final_state": 0}
    return {name: np.concatenate([part[name] for part in parts], axis=axis[name]) for name in parts[0]}


def relative_error(result: Array, truth: Array) -> float:
    """Relative L2 norm of ``result - truth``; infinite if anything is not finite, absolute where truth is zero."""
    got, want = np.asarray(result).astype(np.float64), np.asarray(truth).astype(np.float64)
    if got.shape != want.shape or not np.all(np.isfinite(got)):
        return float("inf")
    norm = float(np.linalg.norm(want))
    error = float(np.linalg.norm(got - want))
    return error / norm if norm > 0 else error


def tolerance(what: str, dtype: str, case: str = "normal") -> float:
    """The spec's tolerance for ``what`` ("cpu", "body", "cuda"), an element type, and a case of ``inputs.CASES``."""
    table = TOLERANCES[what]
    return table[dtype] * (table["hard_factor"] if case == "collinear-slow" else 1.0)
