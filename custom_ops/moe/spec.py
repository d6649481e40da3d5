"""The op ``deltafuse::GroupedQMoE``, version 1: inputs, outputs, attributes, shapes, limits, tolerances.

A mixture of gated experts behind a group-limited router (DeepSeek-V3, arXiv:2412.19437; without groups n_group = 1),
and the shared expert beside it. For a token x of width D::

    logits = router_weight x                                  (or given)
    scores = sigmoid(logits) or softmax(logits)               over all E experts
    choice = scores + expert_bias                             for choosing only; choose_by_logits: of the logits
    group score = sum of the group_top largest choices of a group; the topk_group best groups stay,
                  the choices of the others become masked_score (minus infinity, or 0)
    ids    = the top_k largest choices
    w      = scores[ids] (masked_weights: 0 for a chosen expert of a masked group);
             divided by max(their sum + norm_eps, norm_min) with norm_topk_prob; times routed_scaling_factor
    y      = sum_i w_i expert_{ids_i}(x) + shared(x)
    expert(x) = down (act(gate x) * (up x + up_offset)), or down act(up x) with gated = 0
                (each projection with its bias, where there is one)

The last zero_experts of the E experts have no weights and give x back (LongCat-Flash, arXiv:2509.01322).

Selection is the same on every target. **Logits and scores are the float32 roundings of values computed in float64**:
the logits from the stored operands (router_bias added before the rounding), the scores from the rounded logits, each
subnormal kept. Sigmoid is 1 / (1 + exp(-x)); softmax takes the maximum off first, and a NaN or +inf among a token's
logits makes all its scores NaN. The choice is a float32 sum. The group score is a float32 sum, larger choices first. A
choice or a group score that is NaN counts as minus infinity. Of equal numbers the lower index wins, and an expert is
chosen once at most (one of choice minus infinity too, where nothing better is left), so ids are valid and distinct
whatever the numbers are. Weights are computed from the scores as they are, in float32 or better: an expert with a NaN
score, if chosen nevertheless, has a NaN weight.

Weights are stored as ``nn.Linear`` has them, one row an output channel, in the type of the activations or quantized
along the rows (input channels) in blocks, as ``DequantizeLinear`` reads them: value = (stored - zero_point) * scale.
The last block of a row may be shorter. "bfloat16" weights are bfloat16 whatever T is, and have no scales. 4-bit and
float8 numbers are held as uint8, the very bytes of ONNX's int4, uint4 and float8e4m3fn tensors (see ``packing.py``), so
weight_format and shared_format say what they are.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from typing import Any

from ..common.refusal import Refusal
from .packing import FOUR_BIT

DOMAIN = "deltafuse"
OP_TYPE = "GroupedQMoE"
VERSION = 1

#: Formal inputs in order. T: float32, float16 or bfloat16. TW: T ("float"), bfloat16, int8, uint8 ("uint8"; "float8";
#: "int4" and "uint4", whose last dimension is halved). TS: T or float32, each matrix its own. E num_experts, F = E -
#: zero_experts, D hidden size, I intermediate_size, J shared_intermediate_size, k top_k, N tokens, G = 2 with gated
#: (gate rows, then up rows), else 1. Scales of a matrix [.., rows, cols] have the shape
#: [.., ceil(rows / block_rows), ceil(cols / block_size)];
#: zero points have the scales' shape, one byte each: int8 for int4 and int8, uint8 for uint4 and uint8.
INPUTS: dict[str, str] = {
    "x": "T [N, D] or [B, S, D]: tokens",
    "router_weight": "float32 or T [E, D], optional: given unless router_logits is",
    "router_logits": "float32 or T [N, E] or [B, S, E], optional: logits computed outside",
    "router_bias": "float32 [E], optional: added to the logits",
    "expert_bias": "float32 [E], optional: added to the scores for choosing only",
    "gate_up_weight": "TW [F, G*I, D]: gate rows, then up rows",
    "gate_up_scale": "TS, optional: quantized weights have it",
    "gate_up_zero_point": "optional",
    "down_weight": "TW [F, D, I]",
    "down_scale": "TS, optional",
    "down_zero_point": "optional",
    "shared_gate_up_weight": "TW [G*J, D], optional: the shared expert",
    "shared_gate_up_scale": "TS, optional",
    "shared_gate_up_zero_point": "optional",
    "shared_down_weight": "TW [D, J], optional",
    "shared_down_scale": "TS, optional",
    "shared_down_zero_point": "optional",
    "shared_gate_weight": "T or float32 [1, D], optional: shared(x) is times sigmoid(shared_gate_weight x)",
    "gate_up_bias": "float32 [F, G*I], optional",
    "down_bias": "float32 [F, D], optional",
    "shared_gate_up_bias": "float32 [G*J], optional",
    "shared_down_bias": "float32 [D], optional",
}

OUTPUTS: dict[str, str] = {
    "y": "T, the shape of x",
    "expert_ids": "int64 [N, k]: best choice first",
    "expert_weights": "float32 [N, k]",
}

REQUIRED_INPUTS = ("x", "gate_up_weight", "down_weight")

#: Tolerances: relative L2 norm of (result - float64 reference on the same stored weights), by what computes and the
#: type T; ids are equal, always. ``float8_activations``: kernels that also quantize the activations to float8.
TOLERANCES: dict[str, dict[str, float]] = {
    "cpu": {"float32": 2e-5, "float16": 2e-3, "bfloat16": 1e-2},
    "body": {"float32": 2e-5, "float16": 2e-3, "bfloat16": 1e-2},
    "cuda": {"float32": 1e-3, "float16": 3e-3, "bfloat16": 1e-2, "float8_activations": 5e-2},
}

FORMATS = ("float", "int4", "uint4", "int8", "uint8", "float8", "bfloat16")
#: The weight matrices: inputs are named NAME_weight, NAME_scale, NAME_zero_point.
MATRICES = ("gate_up", "down", "shared_gate_up", "shared_down")
#: The experts' biases.
BIASES = tuple(f"{name}_bias" for name in MATRICES)
#: Formats without scales.
PLAIN_FORMATS = ("float", "bfloat16")
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu2")
SCORES = ("sigmoid", "softmax")


@dataclass(frozen=True)
class MoeConfig:
    """Attributes of one call and which optional inputs and outputs it has (see :class:`..kda.spec.KdaConfig`)."""

    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    shared_intermediate_size: int = 0  # 0: no shared expert
    zero_experts: int = 0  # how many of the last experts give back what they are given
    score_function: str = "sigmoid"
    choose_by_logits: int = 0  # 1: logits are chosen from, not scores, of which many may be equal
    n_group: int = 1
    topk_group: int = 1
    group_top: int = 2  # a group's score is the sum of this many of its best choices; 1: their maximum
    masked_score: str = "-inf"  # "-inf" | "0": the choice of an expert in a group that did not stay
    masked_weights: int = 0  # 1: an expert of such a group, if chosen nevertheless, weighs 0
    norm_topk_prob: int = 1
    norm_eps: float = 0.0
    norm_min: float = 0.0  # what the scores are divided by is at least this
    routed_scaling_factor: float = 1.0
    activation: str = "silu"
    activation_alpha: float = 1.0  # silu is x sigmoid(activation_alpha x)
    gated: int = 1
    up_offset: float = 0.0  # added to the up projection, after its clamp
    # "none" | "before": min(gate, gate_limit) and clip(up, +-up_limit), then the activation
    # | "after": min(act(gate), gate_limit) and clip(up, +-up_limit)
    clamp: str = "none"
    gate_limit: float = math.inf
    up_limit: float = math.inf
    # blocks along a row that share a scale (0: the whole row), and rows that share one (float8 128x128: 128)
    block_size: int = 0
    block_rows: int = 1
    shared_block_size: int = 0
    shared_block_rows: int = 1
    weight_format: str = "float"  # one of FORMATS
    shared_format: str = "float"
    # form of the operands (not attributes)
    has_zero_point: bool = False
    shared_has_zero_point: bool = False
    has_router_weight: bool = True  # else router_logits
    has_router_bias: bool = False
    has_expert_bias: bool = False
    has_shared_gate: bool = False
    has_gate_up_bias: bool = False
    has_down_bias: bool = False
    has_shared_gate_up_bias: bool = False
    has_shared_down_bias: bool = False
    has_ids: bool = False  # expert_ids and expert_weights are asked for

    @property
    def own_experts(self) -> int:
        """Experts with weights."""
        return self.num_experts - self.zero_experts

    def attributes(self) -> dict[str, Any]:
        """The node's attributes, in a fixed order. Those of :data:`LATER` are there only if they say something."""
        found = {name: getattr(self, name) for name in ATTRIBUTES}
        return {name: value for name, value in found.items() if name not in LATER or value != LATER[name]}

    def weights_form(self, name: str) -> tuple[str, tuple[int, int], bool]:
        """Format, (block_size, block_rows) and whether there are zero points, of ``"gate_up"`` .. ``"shared_down"``."""
        if name.startswith("shared_"):
            blocks = (self.shared_block_size, self.shared_block_rows)
            return self.shared_format, blocks, self.shared_has_zero_point
        return self.weight_format, (self.block_size, self.block_rows), self.has_zero_point

    def input_names(self) -> tuple[str, ...]:
        """Names of the formal inputs that a call of this configuration supplies."""
        shared = self.shared_intermediate_size > 0
        have = {
            "x": True,
            "router_weight": self.has_router_weight,
            "router_logits": not self.has_router_weight,
            "router_bias": self.has_router_bias,
            "expert_bias": self.has_expert_bias,
            "shared_gate_weight": shared and self.has_shared_gate,
            "gate_up_bias": self.has_gate_up_bias,
            "down_bias": self.has_down_bias,
            "shared_gate_up_bias": shared and self.has_shared_gate_up_bias,
            "shared_down_bias": shared and self.has_shared_down_bias,
        }
        for matrix in MATRICES:
            kind, _, zero = self.weights_form(matrix)
            there = shared or not matrix.startswith("shared_")
            quantized = there and kind not in PLAIN_FORMATS
            have[f"{matrix}_weight"] = there
            have[f"{matrix}_scale"] = quantized
            have[f"{matrix}_zero_point"] = quantized and zero
        return tuple(name for name in INPUTS if have[name])

    def output_names(self) -> tuple[str, ...]:
        """Names of the outputs that a call of this configuration asks for."""
        return tuple(OUTPUTS) if self.has_ids else ("y",)

    def overload(self) -> str:
        """A readable name for the specialised function body; equal configurations give equal names."""
        sizes = ("num_experts", "top_k", "hidden_size", "intermediate_size")
        parts = [f"e{self.num_experts}k{self.top_k}d{self.hidden_size}i{self.intermediate_size}"]
        defaults = {f.name: f.default for f in fields(self)}
        for name, value in asdict(self).items():
            if name in sizes or value == defaults[name]:
                continue
            short = name.removeprefix("has_")
            shown = "" if value is True else f"_{value}" if isinstance(value, str) else f"_{value!r}"
            parts.append(short + shown)
        return "-".join(parts).replace(".", "p").replace("+", "")

    def check(self) -> Refusal | None:
        """Is the configuration one that the op defines? (Kernels may take less: see :func:`cuda_refusal`.)"""
        sizes = {
            name: getattr(self, name)
            for name in (
                "num_experts",
                "top_k",
                "hidden_size",
                "intermediate_size",
                "n_group",
                "topk_group",
                "group_top",
            )
        }
        if min(sizes.values()) < 1:
            shown = ", ".join(f"{name} {value}" for name, value in sizes.items())
            return Refusal("geometry", f"{shown}: all must be 1 or more")
        if self.shared_intermediate_size < 0:
            return Refusal("geometry", f"shared_intermediate_size {self.shared_intermediate_size}: must be 0 or more")
        if not 0 <= self.zero_experts < self.num_experts:
            return Refusal("geometry", f"zero_experts {self.zero_experts} of num_experts {self.num_experts}")
        if self.top_k > self.num_experts:
            return Refusal("top-k", f"top_k {self.top_k} of num_experts {self.num_experts}")
        if self.num_experts % self.n_group or self.topk_group > self.n_group:
            return Refusal(
                "groups", f"num_experts {self.num_experts}, n_group {self.n_group}, topk_group {self.topk_group}"
            )
        if self.group_top > self.num_experts // self.n_group:
            return Refusal(
                "groups", f"group_top {self.group_top} of {self.num_experts // self.n_group} experts a group"
            )
        allowed: dict[str, tuple[Any, ...]] = {
            "score_function": SCORES,
            "masked_score": ("-inf", "0"),
            "choose_by_logits": (0, 1),
            "masked_weights": (0, 1),
            "norm_topk_prob": (0, 1),
            "activation": ACTIVATIONS,
            "gated": (0, 1),
            "clamp": ("none", "before", "after"),
            "weight_format": FORMATS,
            "shared_format": FORMATS,
        }
        for name, values in allowed.items():
            if getattr(self, name) not in values:
                shown = ", ".join(map(str, values))
                return Refusal("attribute", f"{name} {getattr(self, name)!r}: expected one of {shown}")
        numbers = ("routed_scaling_factor", "norm_eps", "norm_min", "activation_alpha", "up_offset")
        if not all(math.isfinite(getattr(self, name)) for name in numbers) or self.norm_min < 0:
            return Refusal("scale", ", ".join(f"{name} {getattr(self, name)}" for name in numbers))
        if self.activation != "silu" and self.activation_alpha != 1.0:
            return Refusal("activation", f"activation_alpha {self.activation_alpha}: {self.activation} has none")
        if not self.gated and self.up_offset:
            return Refusal(
                "activation", f"up_offset {self.up_offset}, gated 0: there is no up projection beside a gate"
            )
        if self.clamp != "none" and not (self.gated and self.gate_limit > 0 and self.up_limit > 0):
            return Refusal("clamp", f"gate_limit {self.gate_limit}, up_limit {self.up_limit}, gated {self.gated}")
        return self._check_blocks()

    def _check_blocks(self) -> Refusal | None:
        for name in MATRICES:
            shared = name.startswith("shared_")
            inter = self.shared_intermediate_size if shared else self.intermediate_size
            kind, cols = self.weights_form(name)[0], inter if name.endswith("down") else self.hidden_size
            if kind in FOUR_BIT and cols % 2:
                return Refusal("odd-width", f"{name}_weight has rows of {cols}: {kind} needs an even number")
            size = self.weights_form(name)[1][0]
            if kind in FOUR_BIT and size > 0 and size % 2:
                return Refusal("odd-block", f"{name}_weight has blocks of {size}: {kind} needs an even number")
        for prefix in ("", "shared_"):
            kind, (size, rows), zero = self.weights_form(f"{prefix}down")
            if kind in PLAIN_FORMATS and (size or rows != 1 or zero):
                return Refusal("blocks", f"{prefix}block_size {size}: the weights are not quantized")
            if size < 0 or rows < 1:
                return Refusal("blocks", f"{prefix}block_size {size}, {prefix}block_rows {rows}")
            if rows != 1 and kind != "float8":
                return Refusal("blocks", f"{prefix}block_rows {rows}: {kind} has scales of its own for each row")
            if zero and kind == "float8":
                return Refusal("blocks", f"{prefix}zero_point: float8 has none")
        return None


ATTRIBUTES = (
    "num_experts",
    "top_k",
    "hidden_size",
    "intermediate_size",
    "shared_intermediate_size",
    "zero_experts",
    "score_function",
    "choose_by_logits",
    "n_group",
    "topk_group",
    "group_top",
    "masked_score",
    "masked_weights",
    "norm_topk_prob",
    "norm_eps",
    "norm_min",
    "routed_scaling_factor",
    "activation",
    "activation_alpha",
    "gated",
    "up_offset",
    "clamp",
    "gate_limit",
    "up_limit",
    "block_size",
    "block_rows",
    "shared_block_size",
    "shared_block_rows",
    "weight_format",
    "shared_format",
)


#: Attributes that the op did not have at first, and their defaults. A node has them only where they differ: so a model
#: that needs none of them runs in an older plugin, and an older model's nodes need none.
LATER: dict[str, Any] = {
    "zero_experts": 0,
    "choose_by_logits": 0,
    "norm_min": 0.0,
    "activation_alpha": 1.0,
    "up_offset": 0.0,
}


#: What the CUDA kernels take at most (``moe_launch.h``).
CUDA_EXPERTS, CUDA_TOP_K = 1024, 32


def cuda_refusal(config: MoeConfig) -> Refusal | None:
    """Why the CUDA kernels do not take this configuration, or None. The C++ check says the same (``moe.h``)."""
    if config.num_experts > CUDA_EXPERTS:
        return Refusal("num-experts", f"num_experts {config.num_experts}: kernels take up to {CUDA_EXPERTS}")
    if config.top_k > CUDA_TOP_K:
        return Refusal("top-k", f"top_k {config.top_k}: kernels take up to {CUDA_TOP_K}")
    later = [f"{name} {getattr(config, name)}" for name, default in LATER.items() if getattr(config, name) != default]
    later += [name for name in config.input_names() if name in BIASES]
    if later:
        return Refusal("later", f"{', '.join(later)}: the kernels have none")
    return config.check()
