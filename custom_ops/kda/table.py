"""The spec as Markdown tables: ``python -m deltafuse.custom_ops.kda.table README.md`` puts them into the README."""

from __future__ import annotations

import sys

from ..common.spec_table import between_markers, spec_tables, write_readme
from .spec import INPUTS, OUTPUTS, TOLERANCES, KdaConfig

#: What each attribute means; the spec's comments in a sentence.
MEANING = {
    "num_heads": "H, heads of q and k",
    "num_v_heads": "HV, heads of v, g, beta and o: a multiple of H",
    "head_dim": "K, width of a query and key head",
    "head_v_dim": "V, width of a value head",
    "scale": "factor of the outputs",
    "qk_l2norm": "`none`; `sum`: x / sqrt(sum x² + eps); `max`: x / max(sqrt(sum x²), eps)",
    "l2norm_eps": "its eps",
    "gate_activation": (
        "`none`: g is the log decay; `softplus`: -exp(A_log) softplus(g + dt_bias); "
        "`sigmoid`: lower_bound sigmoid(exp(A_log) (g + dt_bias))"
    ),
    "lower_bound": "lowest log decay of the `sigmoid` gate",
    "beta_activation": "`none` or `sigmoid`",
    "beta_scale": "factor of beta after its activation",
    "conv_activation": "`none` or `silu`, after the convolution",
    "output_gate": "`none`, `sigmoid` or `silu` of gate",
    "norm_eps": "eps of the RMS norm",
    "state_layout": "`KV`: [N, HV, K, V]; `VK`: [N, HV, V, K]",
    "conv_state_width": "columns of conv_state and present_conv_state: W - 1, W, or 0 for neither",
}


def markdown() -> str:
    """The tables of inputs, outputs, attributes and tolerances."""
    return spec_tables(INPUTS, OUTPUTS, KdaConfig, MEANING, TOLERANCES)


def updated(text: str) -> str:
    """``text`` with what lies between the markers replaced by :func:`markdown`."""
    return between_markers(text, markdown())


if __name__ == "__main__":
    write_readme(sys.argv[1], markdown())
