"""Random and hostile inputs for the op: shared by the tests, the CUDA checks and the proofs."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from .packing import RANGES, ZERO_POINTS, pack
from .spec import PLAIN_FORMATS, MoeConfig

Array = NDArray[Any]

#: What :func:`draw_inputs` can draw.
CASES = (
    "normal",
    "ties",  # experts in pairs with equal router rows and biases, some across groups
    "equal-scores",  # every expert scores the same for every token
    "near-ties",  # experts whose logits differ in their last bits
    "one-expert",  # all tokens go to the same top_k experts
    "two-experts",  # most experts have no token
    "bias-nan",  # a corrupted expert bias
    "bias-inf",
    "bias-all-nan",
    "huge-logits",  # scores are exactly 0 or 1, or subnormal
    "low-logits",  # scores are tiny: where norm_eps counts
    "zero-tokens",  # rows of zeros among the tokens, as padding leaves them
    "zero-scales",  # blocks whose scale is 0; for plain weights, rows of zeros
    "extreme-weights",  # only the largest and the smallest stored numbers
    "large-activations",  # past every clamp
    "small-activations",  # where an activation's curvature hardly shows
)

DTYPES: dict[str, Any] = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def scale_shape(shape: tuple[int, ...], block_size: int, block_rows: int) -> tuple[int, ...]:
    """Shape of the scales of weights ``[.., rows, cols]``."""
    *lead, rows, cols = shape
    return (*lead, -(-rows // block_rows), -(-cols // (block_size or cols)))


def _weights(
    shape: tuple[int, ...],
    kind: str,
    blocks: tuple[int, int],
    zero_points: bool,
    dtypes: tuple[Any, Any],
    rng: np.random.Generator,
    case: str,
) -> tuple[Array, Array | None, Array | None]:
    """Stored weights, scales and zero points of ``[.., rows, cols]`` numbers of about 1 / sqrt(cols)."""
    size = 1.0 / np.sqrt(shape[-1])
    dtype, scale_dtype = dtypes
    if kind in PLAIN_FORMATS:
        plain = size * rng.standard_normal(shape, np.float32)
        if case == "zero-scales":
            plain[..., ::3, :] = 0.0
        return plain.astype(dtype if kind == "float" else DTYPES["bfloat16"]), None, None
    low, high = RANGES[kind]
    if kind == "float8":
        stored = np.clip(rng.standard_normal(shape, np.float32) * 100.0, low, high)
        spread = 100.0
    else:
        stored = rng.integers(low, high + 1, shape, dtype=np.int32)
        spread = (high - low) / np.sqrt(12.0)
    if case == "extreme-weights":
        stored = np.where(rng.random(shape) < 0.5, low, high)
        spread = (high - low) / 2.0
    scales = scale_shape(shape, *blocks)
    scale = size / spread * rng.uniform(0.5, 1.5, scales)
    if case == "zero-scales":
        scale = np.where(rng.random(scales) < 0.3, 0.0, scale)
    zero = None
    if zero_points:
        middle = (low + high + 1) // 2
        zero = np.clip(middle + rng.integers(-3, 4, scales), low, high).astype(ZERO_POINTS[kind])
        if case == "extreme-weights":
            zero = np.where(rng.random(scales) < 0.5, low, high).astype(ZERO_POINTS[kind])
    return pack(stored, kind), scale.astype(scale_dtype), zero


def _router(config: MoeConfig, x: Array, rng: np.random.Generator, case: str) -> dict[str, Array]:
    """router_weight, router_logits, router_bias and expert_bias; ``x`` ``[N, D]`` may be changed."""
    experts = config.num_experts
    weight = rng.standard_normal((experts, config.hidden_size)) / np.sqrt(config.hidden_size)
    router_bias = 0.3 * rng.standard_normal(experts)
    bias = 0.1 * rng.standard_normal(experts)
    if case == "ties":
        source = np.arange(experts)
        source[1::2] = source[0 : experts - 1 : 2]  # neighbours
        source[experts // 2 :] = source[: experts - experts // 2]  # and halves: other groups
        weight, router_bias, bias = weight[source], router_bias[source], bias[source]
    elif case == "equal-scores":
        weight[:], router_bias[:], bias[:] = 0.0, 0.25, 0.0
    elif case == "near-ties":
        weight[:], router_bias[:], bias[:] = weight[0], 0.125, 0.0
        weight *= 1.0 + 2.0**-21 * rng.integers(0, 3, (experts, 1))
    elif case in ("one-expert", "two-experts"):
        # in groups that can all stay
        kept = np.isin(
            np.arange(experts) // (experts // config.n_group), rng.permutation(config.n_group)[: config.topk_group]
        )
        favourites = rng.permutation(np.flatnonzero(kept))[: config.top_k + (case == "two-experts")]
        x[:, 0] = 1.0
        weight[:, 0] = -1.0
        weight[favourites, 0] = 3.0 + 0.5 * np.arange(len(favourites))
        bias[:] = 0.0
        bias[favourites] = 4.0
    elif case in ("bias-nan", "bias-inf"):
        kinds = [np.nan] if case == "bias-nan" else [np.inf, -np.inf]
        for kind in kinds:
            bias[rng.permutation(experts)[: max(1, experts // 4)]] = kind
    elif case == "bias-all-nan":
        bias[:] = np.nan
    elif case == "huge-logits":
        weight *= 10.0 ** rng.uniform(1.0, 3.0, (experts, 1))
    elif case == "low-logits":
        # logits of about -12 (sigmoid)
        x[:, 0] = 1.0
        weight[:, 0] = -12.0
    values = {"router_weight": weight, "router_bias": router_bias, "expert_bias": bias}
    values["router_logits"] = x.astype(np.float64) @ weight.T
    if case in ("ties", "equal-scores"):
        # equal rows gave equal numbers, but not to the last bit in every BLAS
        values["router_logits"] = np.round(values["router_logits"], 3)
    return values


def draw_inputs(
    config: MoeConfig,
    tokens: int | tuple[int, int],
    rng: np.random.Generator,
    case: str = "normal",
    dtype: str = "float32",
    *,
    scale_dtype: str = "float32",
    router_dtype: str = "float32",
) -> dict[str, Array]:
    """Draw the operands that ``config.input_names()`` names.

    Args:
        config: the call.
        tokens: N, or (B, S) for a three-dimensional x.
        rng: where randomness comes from; equal generators give equal inputs.
        case: one of :data:`CASES`.
        dtype: element type of T. scale_dtype: of TS. router_dtype: of router_weight, router_logits and
            shared_gate_weight.

    Raises:
        ValueError: an unknown case.
    """
    if case not in CASES:
        raise ValueError(f"unknown case {case!r}: one of {', '.join(CASES)}")
    hidden, inter, joined = config.hidden_size, config.intermediate_size, 2 if config.gated else 1
    lead = tokens if isinstance(tokens, tuple) else (tokens,)
    x = rng.standard_normal((int(np.prod(lead)), hidden))
    x *= {"large-activations": 30.0, "small-activations": 0.1}.get(case, 1.0)
    if case == "zero-tokens":
        x[::2] = 0.0
    x = x.astype(DTYPES[dtype])
    values = _router(config, x, rng, case)
    values["x"] = x.reshape(*lead, hidden)
    values["router_logits"] = values["router_logits"].reshape(*lead, config.num_experts)
    values["shared_gate_weight"] = rng.standard_normal((1, hidden)) / np.sqrt(hidden)
    dtypes = (DTYPES[dtype], DTYPES[scale_dtype])
    shared = config.shared_intermediate_size
    for name, shape in (
        ("gate_up", (config.own_experts, joined * inter, hidden)),
        ("down", (config.own_experts, hidden, inter)),
        ("shared_gate_up", (joined * shared, hidden)),
        ("shared_down", (hidden, shared)),
    ):
        if 0 in shape:
            continue
        kind, blocks, zero = config.weights_form(name)
        if f"{name}_bias" in config.input_names():
            values[f"{name}_bias"] = (0.3 * rng.standard_normal(shape[:-1])).astype(np.float32)
        stored, scale, zero_point = _weights(shape, kind, blocks, zero, dtypes, rng, case)
        values[f"{name}_weight"] = stored
        if scale is not None:
            values[f"{name}_scale"] = scale
        if zero_point is not None:
            values[f"{name}_zero_point"] = zero_point
    own = {
        "router_weight": DTYPES[router_dtype],
        "router_logits": DTYPES[router_dtype],
        "shared_gate_weight": DTYPES[router_dtype],
        "router_bias": np.float32,
        "expert_bias": np.float32,
    }
    return {name: values[name].astype(own[name]) if name in own else values[name] for name in config.input_names()}
