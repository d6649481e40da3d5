"""The op ``deltafuse::KimiDeltaAttention``, version 1: inputs, outputs, attributes, shapes, limits, tolerances.

Kimi Delta Attention (Kimi Linear, arXiv:2510.26692) is the delta rule with a decay for every key channel.
For one value head, with keys of width K, values of width V, a state S of shape (K, V), log decay ``g_t <= 0``
per key channel and rate ``beta_t``::

    S_t = diag(exp g_t) S_{t-1} + k_t (beta_t (v_t - (diag(exp g_t) S_{t-1})^T k_t))^T
    o_t = scale * S_t^T q_t

Everything around that recurrence is optional and is done in this order:

1. ``conv``: a causal depthwise convolution over the channels ``q | k | v``, then SiLU.
2. ``qk_l2norm``: L2 norm of each query and key head.
3. ``gate_activation``: the log decay from its pre-activation, ``A_log`` and ``dt_bias``.
4. ``beta_activation``: sigmoid, times ``beta_scale``.
5. the recurrence.
6. RMS norm of each output head over V, times ``norm_weight``.
7. ``output_gate``: times sigmoid or SiLU of ``gate``.

Query head ``h // (num_v_heads // num_heads)`` serves value head ``h``.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from typing import Any

from ..common.refusal import Refusal

DOMAIN = "deltafuse"
OP_TYPE = "KimiDeltaAttention"
VERSION = 1

#: Formal inputs in order. T: float32, float16 or bfloat16, the same for all. TS: the states' type, one of these too.
#: B batch, S tokens, H = num_heads, HV = num_v_heads, K = head_dim, V = head_v_dim, C = 2 H K + HV V,
#: W the convolution's width, N sequences (N = B unless ``cu_seqlens`` is given, then B = 1).
INPUTS: dict[str, str] = {
    "q": "T [B, S, H*K]: queries; or [B, S, C], packed q | k | v, when k and v are absent",
    "k": "T [B, S, H*K], optional: keys",
    "v": "T [B, S, HV*V], optional: values",
    "g": "T [B, S, HV*K]: gate pre-activation, or the log decay itself with gate_activation 'none'",
    "beta": "T [B, S, HV]: update rate before beta_activation",
    "A_log": "float32 [HV], optional: log of the decay rate; required unless gate_activation is 'none'",
    "dt_bias": "float32 [HV*K], optional: added to g before the activation",
    "conv_weight": "float32 [C, 1, W], optional: depthwise causal convolution over q | k | v",
    "conv_bias": "float32 [C], optional",
    "conv_state": "T [N, C, W-1] or [N, C, W], optional: the last inputs of the convolution; zeros when absent",
    "initial_state": "TS [N, HV, K, V] (state_layout 'KV') or [N, HV, V, K] ('VK'), optional: zeros when absent",
    "norm_weight": "float32 [V], optional: RMS norm of each output head",
    "gate": "T [B, S, HV*V], optional: output gate before its activation",
    "cu_seqlens": "int32 or int64 [N+1], optional: exclusive prefix sums of the sequences' lengths, B = 1",
}

OUTPUTS: dict[str, str] = {
    "o": "T [B, S, HV*V]",
    "present_conv_state": "T, the shape of conv_state ([N, C, conv_state_width])",
    "final_state": "TS, the shape of initial_state",
}

REQUIRED_INPUTS = ("q", "g", "beta")

#: Tolerances: relative L2 norm of (result - float64 reference), by what computes and the type T. Never loosened.
#: ``hard`` is the nearly collinear, slowly decaying case of kda-math (keys close to one direction, decay near 0).
TOLERANCES: dict[str, dict[str, float]] = {
    "cpu": {"float32": 2e-5, "float16": 2e-3, "bfloat16": 1e-2, "hard_factor": 5.0},
    "body": {"float32": 2e-5, "float16": 2e-3, "bfloat16": 1e-2, "hard_factor": 5.0},
    "cuda": {"float32": 1e-3, "float16": 3e-3, "bfloat16": 1e-2, "hard_factor": 4.0},
}

HEAD_DIMS_CUDA = (64, 128, 192, 256)
MAX_CONV_WIDTH = 8


@dataclass(frozen=True)
class KdaConfig:
    """Attributes of one call and which optional inputs and outputs it has.

    The attributes are written on the node for the kernels; the function body is specialised for the whole
    configuration and is told apart by its ``overload`` (see :meth:`overload`).
    """

    num_heads: int
    num_v_heads: int
    head_dim: int
    head_v_dim: int
    scale: float
    qk_l2norm: str = "none"  # "none" | "sum": x / sqrt(sum x^2 + eps) | "max": x / max(sqrt(sum x^2), eps)
    l2norm_eps: float = 1e-6
    gate_activation: str = "none"  # "none" | "softplus": -exp(A_log) softplus(g + dt_bias)
    #                                | "sigmoid": lower_bound * sigmoid(exp(A_log) (g + dt_bias))
    lower_bound: float = -5.0
    beta_activation: str = "none"  # "none" | "sigmoid"
    beta_scale: float = 1.0
    conv_activation: str = "none"  # "none" | "silu"
    output_gate: str = "none"  # "none" | "sigmoid" | "silu"
    norm_eps: float = 1e-5
    state_layout: str = "KV"  # "KV" | "VK"
    conv_width: int = 0  # 0: no convolution
    conv_state_width: int = 0  # columns of conv_state / present_conv_state; 0: neither is there
    # presence of optional operands (not attributes)
    packed_qkv: bool = False
    has_dt_bias: bool = False
    has_conv_bias: bool = False
    has_conv_state: bool = False
    has_initial_state: bool = False
    has_norm: bool = False
    has_cu_seqlens: bool = False
    has_present_conv_state: bool = False
    has_final_state: bool = False

    @property
    def conv_channels(self) -> int:
        """C, channels of q | k | v together."""
        return 2 * self.num_heads * self.head_dim + self.num_v_heads * self.head_v_dim

    def attributes(self) -> dict[str, Any]:
        """The node's attributes, in a fixed order. ``state_dtype`` is the node's too, but not the config's."""
        return {name: getattr(self, name) for name in ATTRIBUTES}

    def input_names(self) -> tuple[str, ...]:
        """Names of the formal inputs that a call of this configuration supplies."""
        have = {
            "q": True,
            "k": not self.packed_qkv,
            "v": not self.packed_qkv,
            "g": True,
            "beta": True,
            "A_log": self.gate_activation != "none",
            "dt_bias": self.has_dt_bias,
            "conv_weight": self.conv_width > 0,
            "conv_bias": self.has_conv_bias,
            "conv_state": self.has_conv_state,
            "initial_state": self.has_initial_state,
            "norm_weight": self.has_norm,
            "gate": self.output_gate != "none",
            "cu_seqlens": self.has_cu_seqlens,
        }
        return tuple(name for name in INPUTS if have[name])

    def output_names(self) -> tuple[str, ...]:
        """Names of the outputs that a call of this configuration asks for."""
        have = {"o": True, "present_conv_state": self.has_present_conv_state, "final_state": self.has_final_state}
        return tuple(name for name in OUTPUTS if have[name])

    def overload(self) -> str:
        """A readable name for the specialised function body; equal configurations give equal names."""
        parts = [f"h{self.num_heads}v{self.num_v_heads}k{self.head_dim}d{self.head_v_dim}"]
        defaults = {f.name: f.default for f in fields(self)}
        for name, value in asdict(self).items():
            if name in ("num_heads", "num_v_heads", "head_dim", "head_v_dim") or value == defaults[name]:
                continue
            short = name.removeprefix("has_")
            shown = "" if value is True else f"_{value}" if isinstance(value, str) else f"_{value!r}"
            parts.append(short + shown)
        return "-".join(parts).replace(".", "p").replace("+", "")

    def check(self) -> Refusal | None:
        """Is the configuration one that the op defines? (Kernels may take less: see :func:`cuda_refusal`.)"""
        h, hv, k, v = self.num_heads, self.num_v_heads, self.head_dim, self.head_v_dim
        if min(h, hv, k, v) < 1:
            sizes = f"num_heads {h}, num_v_heads {hv}, head_dim {k}, head_v_dim {v}"
            return Refusal("geometry", f"{sizes}: all must be 1 or more")
        if hv % h:
            return Refusal("heads", f"num_v_heads {hv} is not a multiple of num_heads {h}")
        if not math.isfinite(self.scale):
            return Refusal("scale", f"scale {self.scale} is not finite")
        allowed = {
            "qk_l2norm": ("none", "sum", "max"),
            "gate_activation": ("none", "softplus", "sigmoid"),
            "beta_activation": ("none", "sigmoid"),
            "conv_activation": ("none", "silu"),
            "output_gate": ("none", "sigmoid", "silu"),
            "state_layout": ("KV", "VK"),
        }
        for name, values in allowed.items():
            if getattr(self, name) not in values:
                return Refusal("attribute", f"{name} {getattr(self, name)!r}: expected one of {', '.join(values)}")
        if self.gate_activation == "sigmoid" and not self.lower_bound < 0:
            return Refusal("lower-bound", f"lower_bound {self.lower_bound}: the log decay must be negative")
        if self.conv_width and self.conv_state_width not in (0, self.conv_width - 1, self.conv_width):
            return Refusal(
                "conv-state",
                f"conv_state has {self.conv_state_width} columns: expected {self.conv_width - 1} or {self.conv_width}",
            )
        if self.conv_width > MAX_CONV_WIDTH or self.conv_width < 0:
            return Refusal("conv-width", f"conv_width {self.conv_width}: expected 1 to {MAX_CONV_WIDTH}, or 0 for none")
        if not self.conv_width and (
            self.has_conv_bias or self.has_conv_state or self.has_present_conv_state or self.conv_activation != "none"
        ):
            return Refusal("conv", "conv_bias, conv_state or conv_activation without a conv_weight")
        if (self.has_conv_state or self.has_present_conv_state) and not self.conv_state_width:
            return Refusal("conv-state", "conv_state or present_conv_state without conv_state_width")
        return None


ATTRIBUTES = (
    "num_heads",
    "num_v_heads",
    "head_dim",
    "head_v_dim",
    "scale",
    "qk_l2norm",
    "l2norm_eps",
    "gate_activation",
    "lower_bound",
    "beta_activation",
    "beta_scale",
    "conv_activation",
    "output_gate",
    "norm_eps",
    "state_layout",
    "conv_state_width",
)


def cuda_refusal(config: KdaConfig) -> Refusal | None:
    """Why the CUDA kernels do not take this configuration, or None. The C++ check says the same (``kda.h``)."""
    refused = config.check()
    if refused is not None:
        return refused
    for name in ("head_dim", "head_v_dim"):
        if getattr(config, name) not in HEAD_DIMS_CUDA:
            takes = ", ".join(map(str, HEAD_DIMS_CUDA))
            return Refusal("head-dim", f"{name} {getattr(config, name)}: kernels take {takes}")
    return None
