"""Wrong candidates of mixtures of experts: what a recogniser might claim of a right block, each false in one point."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from deltafuse.custom_ops.moe.spec import MoeConfig
from deltafuse.fusions.candidate import Candidate

#: A mutant gives None where its mistake does not apply to the candidate.
Mutant = Callable[[Candidate], Candidate | None]
Where = Callable[[MoeConfig], bool]
MUTANTS: dict[str, Mutant] = {}


def _config(name: str, where: Where = lambda c: True, **changes: Any) -> None:
    """Claim other attributes, where they mean something; a change may be computed from the configuration."""

    def mutant(candidate: Candidate) -> Candidate | None:
        old = candidate.config
        if not where(old):
            return None
        config = replace(old, **{k: v(old) if callable(v) else v for k, v in changes.items()})
        return None if config == old or config.check() else replace(candidate, config=config)

    MUTANTS[name] = mutant


def _parameter(
    name: str, parameter: str, change: Callable[[np.ndarray], np.ndarray], where: Where = lambda c: True
) -> None:
    """Compute a parameter wrongly from the right constants."""

    def mutant(candidate: Candidate) -> Candidate | None:
        right = candidate.parameters.get(parameter)
        if right is None or not where(candidate.config):
            return None

        def compute(arrays: Sequence[np.ndarray]) -> np.ndarray | None:
            value = arrays[0] if right.compute is None else right.compute(arrays)
            return None if value is None else np.ascontiguousarray(change(value.copy()))

        wrong = replace(right, compute=compute, form=f"{right.form} {name}")
        return replace(candidate, parameters={**candidate.parameters, parameter: wrong})

    MUTANTS[name] = mutant


def _dropped(name: str, gone: Callable[[str], bool], **changes: Any) -> None:
    """Claim that parameters are not there."""

    def mutant(candidate: Candidate) -> Candidate | None:
        left = {k: v for k, v in candidate.parameters.items() if not gone(k)}
        if len(left) == len(candidate.parameters):
            return None
        return replace(candidate, parameters=left, config=replace(candidate.config, **changes))

    MUTANTS[name] = mutant


def _grouped(c: MoeConfig) -> bool:
    return c.n_group > 1


def _weightless(c: MoeConfig) -> bool:
    """Do choices beyond the kept experts weigh nothing?"""
    return bool(c.masked_weights) and _few(c)


def _few(c: MoeConfig) -> bool:
    """Do groups keep fewer experts than are chosen?"""
    return _grouped(c) and c.topk_group * c.num_experts // c.n_group < c.top_k


_config("groups off", _grouped, n_group=1, topk_group=1)
_config("one group more", _grouped, topk_group=lambda c: c.topk_group + 1)
_config("one group less", lambda c: c.topk_group > 1, topk_group=lambda c: c.topk_group - 1)
_config("half as many groups", lambda c: c.n_group > 2, n_group=lambda c: c.n_group // 2)
_config("maximum for the best two", lambda c: _grouped(c) and c.group_top == 2, group_top=1)
_config("best two for the maximum", lambda c: _grouped(c) and c.group_top == 1, group_top=2)
_config("mask of zero", lambda c: _grouped(c) and c.masked_score == "-inf" and c.has_expert_bias, masked_score="0")
_config("mask of minus infinity", lambda c: c.masked_score == "0" and c.has_expert_bias, masked_score="-inf")
_config("masked weights count", lambda c: bool(c.masked_weights) and _few(c), masked_weights=0)
_config("masked weights do not count", lambda c: not c.masked_weights and _few(c), masked_weights=1)
_config("not normalised", lambda c: bool(c.norm_topk_prob), norm_topk_prob=0)
_config("normalised", lambda c: not c.norm_topk_prob, norm_topk_prob=1)
_config("epsilon forgotten", lambda c: c.norm_eps > 1e-3, norm_eps=0.0)
_config("epsilon doubled", lambda c: c.norm_eps > 1e-3, norm_eps=lambda c: 2 * c.norm_eps)
_config("an epsilon", lambda c: c.norm_eps == 0.0 and bool(c.norm_topk_prob), norm_eps=1e-3)
_config("scale forgotten", lambda c: c.routed_scaling_factor != 1.0, routed_scaling_factor=1.0)
_config("scale a little off", routed_scaling_factor=lambda c: c.routed_scaling_factor * 1.001)
_config("softmax for sigmoid", lambda c: c.score_function == "sigmoid", score_function="softmax")
_config("sigmoid for softmax", lambda c: c.score_function == "softmax", score_function="sigmoid")
_config("one choice more", lambda c: c.top_k < c.num_experts and not _weightless(c), top_k=lambda c: c.top_k + 1)
_config("one choice less", lambda c: c.top_k > 1 and not _weightless(c), top_k=lambda c: c.top_k - 1)
_config("gelu for silu", lambda c: c.activation == "silu", activation="gelu")
_config("silu for gelu", lambda c: c.activation.startswith("gelu"), activation="silu")
_config("the other gelu", lambda c: c.activation == "gelu", activation="gelu_tanh")
_config("gelu for its approximation", lambda c: c.activation == "gelu_tanh", activation="gelu")
_config("silu for squared relu", lambda c: c.activation == "relu2", activation="silu")
_config("clamp after the activation", lambda c: c.clamp == "before", clamp="after")
_config("clamp before the activation", lambda c: c.clamp == "after", clamp="before")
_config("clamp forgotten", lambda c: c.clamp != "none", clamp="none", gate_limit=np.inf, up_limit=np.inf)
_config("another gate limit", lambda c: c.clamp != "none", gate_limit=lambda c: c.gate_limit * 1.5)
_config("another up limit", lambda c: c.clamp != "none", up_limit=lambda c: c.up_limit * 1.5)
_config("up not clamped", lambda c: c.clamp != "none", up_limit=np.inf)
_config("a clamp", lambda c: c.clamp == "none" and bool(c.gated), clamp="before", gate_limit=2.0, up_limit=2.0)

_config("least divisor forgotten", lambda c: c.norm_min > 1e-3, norm_min=0.0)
_config("a least divisor", lambda c: bool(c.norm_topk_prob) and c.norm_min == 0.0, norm_min=1.9)
_config("slope forgotten", lambda c: c.activation_alpha != 1.0, activation_alpha=1.0)
_config("a slope", lambda c: c.activation == "silu" and c.activation_alpha == 1.0, activation_alpha=1.01)
_config("offset forgotten", lambda c: c.up_offset != 0.0, up_offset=0.0)
_config("an offset", lambda c: bool(c.gated) and c.up_offset == 0.0, up_offset=0.01)
_config("chosen by scores", lambda c: bool(c.choose_by_logits), choose_by_logits=0)
_config(
    "chosen by logits", lambda c: c.has_expert_bias and not c.choose_by_logits and not _grouped(c), choose_by_logits=1
)

_dropped("biases of gate and up forgotten", lambda n: n == "gate_up_bias", has_gate_up_bias=False)
_dropped("biases of down forgotten", lambda n: n == "down_bias", has_down_bias=False)
_dropped("a bias of the shared expert forgotten", lambda n: n == "shared_down_bias", has_shared_down_bias=False)
_dropped("expert bias forgotten", lambda n: n == "expert_bias", has_expert_bias=False)
_dropped("router bias forgotten", lambda n: n == "router_bias", has_router_bias=False)
_dropped(
    "shared expert forgotten",
    lambda n: n.startswith("shared_"),
    shared_intermediate_size=0,
    has_shared_gate=False,
    shared_format="float",
    shared_block_size=0,
    shared_has_zero_point=False,
)
_dropped("shared gate forgotten", lambda n: n == "shared_gate_weight", has_shared_gate=False)

_parameter("expert bias negated", "expert_bias", lambda a: -a)
_parameter("expert bias of another expert", "expert_bias", lambda a: np.roll(a, 1))
_parameter("biases of another expert", "gate_up_bias", lambda a: np.roll(a, 1, axis=0))
_parameter("biases of another channel", "down_bias", lambda a: np.roll(a, 1, axis=-1))
_parameter("router rows of another expert", "router_weight", lambda a: np.roll(a, 1, axis=0))
_parameter("router channels moved", "router_weight", lambda a: np.roll(a, 1, axis=1))


def _swap_halves(a: np.ndarray) -> np.ndarray:
    return np.concatenate(np.split(a, 2, axis=-2)[::-1], axis=-2)


def _two_experts(a: np.ndarray) -> np.ndarray:
    a[[0, 1]] = a[[1, 0]]
    return a


def _last_two(a: np.ndarray) -> np.ndarray:
    a[[-1, -2]] = a[[-2, -1]]
    return a


def _interleave(a: np.ndarray) -> np.ndarray:
    half = a.shape[-2] // 2
    return np.take(a, [i // 2 + (i % 2) * half for i in range(a.shape[-2])], axis=-2)


_parameter("gate and up swapped", "gate_up_weight", _swap_halves, lambda c: bool(c.gated))
_parameter("gate and up of the shared expert swapped", "shared_gate_up_weight", _swap_halves, lambda c: bool(c.gated))
_parameter("gate and up interleaved", "gate_up_weight", _interleave, lambda c: bool(c.gated))
_parameter("two experts' gates swapped", "gate_up_weight", _two_experts)
_parameter("the last two experts' results swapped", "down_weight", _last_two)
_parameter("channels of the result moved", "down_weight", lambda a: np.roll(a, 1, axis=-2))
_parameter("hidden channels moved", "down_weight", lambda a: np.roll(a, 1, axis=-1))
_parameter("scales of another row", "gate_up_scale", lambda a: np.roll(a, 1, axis=-2))
_parameter("scales of another block", "gate_up_scale", lambda a: a[..., ::-1], lambda c: c.block_size > 0)
_parameter("zero points off by one", "down_zero_point", lambda a: a ^ 1)
_parameter(
    "nibbles swapped", "gate_up_weight", lambda a: (a >> 4) | (a << 4), lambda c: c.weight_format in ("int4", "uint4")
)
_parameter("a scale a little off", "down_scale", lambda a: a * np.float32(1.001))
