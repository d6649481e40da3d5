"""Wrong candidates: what a recogniser might claim of a right block, each false in one point."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from deltafuse.custom_ops.kda.spec import KdaConfig
from deltafuse.fusions.candidate import Candidate, Operand

#: A mutant gives None where its mistake does not apply to the candidate.
Mutant = Callable[[Candidate], Candidate | None]
MUTANTS: dict[str, Mutant] = {}


def _config(name: str, where: Callable[[KdaConfig], bool] = lambda c: True, **changes: Any) -> None:
    """Claim other attributes, where they mean something."""

    def mutant(candidate: Candidate) -> Candidate | None:
        config = replace(candidate.config, **changes)
        if config == candidate.config or config.check() or not where(candidate.config):
            return None
        return replace(candidate, config=config)

    MUTANTS[name] = mutant


def _scaled(name: str, attribute: str, factor: float, where: Callable[[KdaConfig], bool] = lambda c: True) -> None:
    """Claim another number, where it means something."""

    def mutant(candidate: Candidate) -> Candidate | None:
        if not where(candidate.config):
            return None
        value = getattr(candidate.config, attribute) * factor
        return replace(candidate, config=replace(candidate.config, **{attribute: value}))

    MUTANTS[name] = mutant


def _swapped(name: str, first: str, second: str) -> None:
    """Claim that two operands are each other."""

    def mutant(candidate: Candidate) -> Candidate | None:
        operands = dict(candidate.operands)
        if first not in operands or second not in operands:
            return None
        operands[first], operands[second] = operands[second], operands[first]
        return replace(candidate, operands=operands)

    MUTANTS[name] = mutant


def _dropped(name: str, operand: str, **changes: Any) -> None:
    """Claim that an operand is not there."""

    def mutant(candidate: Candidate) -> Candidate | None:
        if operand not in candidate.operands:
            return None
        operands = {k: v for k, v in candidate.operands.items() if k != operand}
        return replace(candidate, operands=operands, config=replace(candidate.config, **changes))

    MUTANTS[name] = mutant


def _parameter(name: str, parameter: str, change: Callable[[np.ndarray], np.ndarray]) -> None:
    """Compute a parameter wrongly from the right constants."""

    def mutant(candidate: Candidate) -> Candidate | None:
        right = candidate.parameters.get(parameter)
        if right is None:
            return None

        def compute(arrays: Sequence[np.ndarray]) -> np.ndarray | None:
            value = right.compute(arrays)
            return None if value is None else np.ascontiguousarray(change(value), np.float32)

        return replace(candidate, parameters={**candidate.parameters, parameter: replace(right, compute=compute)})

    MUTANTS[name] = mutant


def _rolled(name: str, operand: str) -> None:
    """Claim the pieces of a concatenated operand in another order."""

    def mutant(candidate: Candidate) -> Candidate | None:
        right = candidate.operands.get(operand)
        if right is None or len(right.pieces) < 2:
            return None
        pieces = right.pieces[1:] + right.pieces[:1]
        return replace(candidate, operands={**candidate.operands, operand: Operand(pieces, right.axis)})

    MUTANTS[name] = mutant


_scaled("scale_doubled", "scale", 2.0)
_scaled("scale_negated", "scale", -1.0)
_scaled("scale_a_thousandth_off", "scale", 1.001)
_scaled("l2_eps_larger", "l2norm_eps", 1e4, lambda c: c.qk_l2norm != "none")
_scaled("l2_eps_ten_times", "l2norm_eps", 10.0, lambda c: c.qk_l2norm != "none")
_scaled("l2_eps_tiny", "l2norm_eps", 1e-6, lambda c: c.qk_l2norm != "none")
_scaled("norm_eps_larger", "norm_eps", 1e4, lambda c: c.has_norm)
_scaled("norm_eps_ten_times", "norm_eps", 10.0, lambda c: c.has_norm)
_scaled("norm_eps_tiny", "norm_eps", 1e-6, lambda c: c.has_norm)
_scaled("lower_bound_off", "lower_bound", 1.02, lambda c: c.gate_activation == "sigmoid")
_scaled("beta_doubled", "beta_scale", 2.0)
_config("scale_one", scale=1.0)
_config("no_l2_norm", qk_l2norm="none")
_config("l2_norm_by_max", qk_l2norm="max")
_config("l2_norm_by_sum", qk_l2norm="sum")
_config("bounded_gate", gate_activation="sigmoid", lower_bound=-5.0)
_config("softplus_gate", gate_activation="softplus")
_config("beta_not_activated", beta_activation="none")
_config("conv_not_activated", conv_activation="none")
_config("silu_output_gate", output_gate="silu")
_config("sigmoid_output_gate", output_gate="sigmoid")
_config("state_transposed", lambda c: c.has_initial_state or c.has_final_state, state_layout="VK")
_config("state_not_transposed", lambda c: c.has_initial_state or c.has_final_state, state_layout="KV")
_swapped("query_and_key", "q", "k")
_swapped("key_and_value", "k", "v")
_swapped("query_and_value", "q", "v")
_swapped("forget_and_output_gate", "g", "gate")
_dropped("initial_state_dropped", "initial_state", has_initial_state=False)
_dropped("conv_state_dropped", "conv_state", has_conv_state=False)
_dropped("output_gate_dropped", "gate", output_gate="none")
_rolled("conv_state_parts_rolled", "conv_state")
_parameter("rate_negated", "A_log", np.negative)
_parameter("rate_exponentiated_twice", "A_log", np.exp)
_parameter("rates_rolled", "A_log", lambda a: np.roll(a, 1))
_parameter("bias_negated", "dt_bias", np.negative)
_parameter("bias_zero", "dt_bias", np.zeros_like)
_parameter("biases_rolled", "dt_bias", lambda a: np.roll(a, 1))
_parameter("taps_reversed", "conv_weight", lambda a: a[..., ::-1])
_parameter("taps_shifted", "conv_weight", lambda a: np.roll(a, 1, axis=-1))
_parameter("conv_channels_rolled", "conv_weight", lambda a: np.roll(a, 1, axis=0))
_parameter("conv_parts_swapped", "conv_weight", lambda a: np.concatenate([a[len(a) // 3 :], a[: len(a) // 3]]))
_parameter("norm_weight_one", "norm_weight", np.ones_like)
_parameter("norm_weight_plus_one", "norm_weight", lambda a: a + 1)
_parameter("norm_weights_reversed", "norm_weight", lambda a: a[::-1])


def _transposed_result(candidate: Candidate) -> Candidate | None:
    """Claim the final state with its last two axes exchanged."""
    right = candidate.results.get("final_state")
    if right is None or candidate.config.head_dim != candidate.config.head_v_dim:
        return None
    return replace(candidate, results={**candidate.results, "final_state": replace(right, permutation=(0, 1, 3, 2))})


MUTANTS["final_state_transposed"] = _transposed_result
