"""The spec as Markdown tables: ``python -m deltafuse.custom_ops.mla.table README.md`` puts them into the README."""

from __future__ import annotations

import sys

from ..common.spec_table import between_markers, spec_tables, write_readme
from .spec import INPUTS, OUTPUTS, TOLERANCES, MlaConfig

#: What each attribute means; the spec's comments in a sentence.
MEANING = {
    "num_heads": "H, heads of queries, keys and values",
    "qk_nope_head_dim": "Dn, channels of a query or key head that are not rotated",
    "qk_rope_head_dim": "Dr, channels that are; 0 for none",
    "v_head_dim": "Dv, width of a value head",
    "kv_lora_rank": "R, width of the latent",
    "scale": "factor of the scores",
    "rope": (
        "`none`; `half`: pairs (x[j], x[j+Dr/2]); `interleaved`: pairs (x[2j], x[2j+1]), left in place; "
        "`deinterleaved`: the same pairs, written to j and j+Dr/2"
    ),
    "causal": "1: a key at position p serves the query at position t where p <= t",
    "window": "above 0: and only where p > t - window",
    "gate_activation": "`none`, or `sigmoid` of gate",
    "kv_norm_eps": "eps of the latent's RMS norm",
    "cache": "`none`; `latent`: latents and rotated keys; `expanded`: keys and values of every head",
    "cache_type": "of the latents: `same` as T, `int8` or `float8`",
}


def markdown() -> str:
    """The tables of inputs, outputs, attributes and tolerances."""
    return spec_tables(INPUTS, OUTPUTS, MlaConfig, MEANING, TOLERANCES)


def updated(text: str) -> str:
    """``text`` with what lies between the markers replaced by :func:`markdown`."""
    return between_markers(text, markdown())


if __name__ == "__main__":
    write_readme(sys.argv[1], markdown())
