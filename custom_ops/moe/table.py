"""The spec as Markdown tables: ``python -m deltafuse.custom_ops.moe.table README.md`` puts them into the README."""

from __future__ import annotations

import sys

from ..common.spec_table import between_markers, spec_tables, write_readme
from .spec import INPUTS, OUTPUTS, TOLERANCES, MoeConfig

#: What each attribute means; the spec's comments in a sentence.
MEANING = {
    "num_experts": "E",
    "top_k": "k, experts a token goes to",
    "hidden_size": "D",
    "intermediate_size": "I, an expert's inner width",
    "shared_intermediate_size": "J, the shared expert's inner width; 0: there is none",
    "zero_experts": "how many of the last experts have no weights and give x back",
    "score_function": "`sigmoid`, or `softmax` over all experts",
    "choose_by_logits": "1: choice is made of logits, not of scores",
    "n_group": "groups of E / n_group neighbouring experts; 1: no groups",
    "topk_group": "groups that stay for a token",
    "group_top": "a group's score is the sum of this many of its largest choices; 1: their maximum",
    "masked_score": "`-inf` or `0`: the choice of an expert whose group does not stay",
    "masked_weights": "1: such an expert, if chosen nevertheless, has weight 0",
    "norm_topk_prob": "1: the chosen scores are divided by max(their sum + norm_eps, norm_min)",
    "norm_eps": "see norm_topk_prob",
    "norm_min": "see norm_topk_prob",
    "routed_scaling_factor": "factor of the weights",
    "activation": "`silu`, `gelu`, `gelu_tanh`, or `relu2`: max(x, 0)²",
    "activation_alpha": "silu is x sigmoid(activation_alpha x)",
    "gated": "1: act(gate x) * (up x + up_offset); 0: act(up x)",
    "up_offset": "see gated; added after the clamp",
    "clamp": (
        "`none`; `before`: gate = min(gate, gate_limit), then the activation; `after`: the activation, then "
        "min(act, gate_limit); with both, up = clip(up, -up_limit, up_limit)"
    ),
    "gate_limit": "see clamp",
    "up_limit": "see clamp",
    "block_size": "input channels that share a scale; 0: all of a row",
    "block_rows": "rows that share a scale (float8 only)",
    "shared_block_size": "the shared expert's",
    "shared_block_rows": "the shared expert's",
    "weight_format": "`float` (T), `bfloat16`, `int4`, `uint4`, `int8`, `uint8`, `float8`",
    "shared_format": "the shared expert's",
}


def markdown() -> str:
    """The tables of inputs, outputs, attributes and tolerances."""
    return spec_tables(INPUTS, OUTPUTS, MoeConfig, MEANING, TOLERANCES)


def updated(text: str) -> str:
    """``text`` with what lies between the markers replaced by :func:`markdown`."""
    return between_markers(text, markdown())


if __name__ == "__main__":
    write_readme(sys.argv[1], markdown())
