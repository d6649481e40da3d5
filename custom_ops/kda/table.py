"""The spec as Markdown tables: ``python -m deltafuse.custom_ops.kda.table README.md`` puts them into the README."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import MISSING, fields
from pathlib import Path

from .spec import ATTRIBUTES, INPUTS, OUTPUTS, TOLERANCES, KdaConfig

BEGIN, END = "<!-- begin: generated from spec.py by table.py -->", "<!-- end: generated -->"

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


def _rows(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [header, tuple("---" for _ in header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def markdown() -> str:
    """The tables of inputs, outputs, attributes and tolerances."""
    operands = []
    for kind, table in (("input", INPUTS), ("output", OUTPUTS)):
        operands += [(kind, f"`{name}`", text) for name, text in table.items()]
    defaults = {field.name: field.default for field in fields(KdaConfig)}
    attributes = [
        (f"`{name}`", "required" if defaults[name] is MISSING else f"`{defaults[name]}`", MEANING[name])
        for name in ATTRIBUTES
    ]
    columns = tuple(TOLERANCES["cpu"])
    tolerances = [(what, *(f"{row[column]:g}" for column in columns)) for what, row in TOLERANCES.items()]
    return "\n\n".join(
        (
            _rows(("", "name", "what"), operands),
            _rows(("attribute", "default", "meaning"), attributes),
            _rows(("tolerance of", *columns), tolerances),
        )
    )


def updated(text: str) -> str:
    """``text`` with what lies between the markers replaced by :func:`markdown`.

    Raises:
        ValueError: a marker is missing.
    """
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"no {BEGIN!r} and {END!r} in the text")
    return f"{head}{BEGIN}\n\n{markdown()}\n\n{END}{tail}"


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(updated(path.read_text(encoding="utf-8")), encoding="utf-8")
