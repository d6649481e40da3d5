"""Exports of latent attention written by hand in further styles.

Usage: ``python -m exports.make_mla_more [NAME ...]`` with torch; no names means all.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.export import Dim

from .make_mla import PAST, TOKENS
from .torch_mla_more import OtherMla
from .torch_side import export, fill


def other(
    name: str, style: str, opset: int = 20, legacy: bool = False, optimize: bool = True, sdpa: bool = False
) -> None:
    """A layer in a further style; see :class:`OtherMla`."""
    model = fill(OtherMla(style, sdpa))
    batch = Dim("B", min=2, max=8)
    one = style in ("one", "scatter")
    written = style in ("scatter", "copy")
    rows = 1 if written else 2

    def inputs(tokens: int, past: int) -> tuple[torch.Tensor, ...]:
        seed = torch.Generator().manual_seed(tokens + past)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=seed)

        x = draw(rows, tokens, 24)
        if style == "deepseek":
            return x, draw(tokens, 2), draw(tokens, 2), torch.full((tokens, tokens), float("-inf")).triu(1)
        if style == "deepseek_absorbed":
            return x, draw(tokens, 2), draw(tokens, 2), draw(rows, past, 16), draw(rows, past, 4)
        if style == "deepseek_cached":
            return x, draw(tokens, 2), draw(tokens, 2), draw(rows, past, 3, 12), draw(rows, past, 3, 6)
        if style == "one":
            return x, draw(1, 1, 1, 4), draw(1, 1, 1, 4), draw(rows, 1, past, 20)
        if written:
            return x, torch.tensor([past]), draw(1, 40, 16), draw(1, 40, 4)
        return (x, torch.arange(tokens).repeat(rows, 1)) if style == "inverse" else (x,)

    past_axes = {
        "deepseek": ({0: TOKENS}, {0: TOKENS}, {0: TOKENS, 1: TOKENS}),
        "deepseek_absorbed": ({0: TOKENS}, {0: TOKENS}, {0: batch, 1: PAST}, {0: batch, 1: PAST}),
        "deepseek_cached": ({0: TOKENS}, {0: TOKENS}, {0: batch, 1: PAST}, {0: batch, 1: PAST}),
        "one": (None, None, {0: batch, 2: PAST}),
        "scatter": (None, None, None),
        "copy": (None, None, None),
        "inverse": ({0: batch, 1: TOKENS},),
    }.get(style, ())
    count, past = (1, 7) if one else (5, 7)
    args = inputs(count, past)
    names = ["x", *(f"rest_{i}" for i in range(len(args) - 1))]
    first = {} if written else {0: batch}
    if not one:
        first[1] = TOKENS
    axes = (first, *past_axes)
    made = [
        f"out_{i}"
        for i in range({"deepseek_absorbed": 3, "deepseek_cached": 3, "scatter": 3, "copy": 3, "one": 2}.get(style, 1))
    ]
    export(
        model,
        args,
        f"mla_{name}",
        names=(names, made),
        dynamic={n: {i: str(d.__name__) for i, d in a.items()} for n, a in zip(names, axes, strict=True) if a}
        if legacy
        else (first, past_axes)
        if past_axes
        else (first,),
        opset=opset,
        legacy=legacy,
        optimize=optimize,
        truth=lambda: {f"T{t}p{p}": inputs(t, p) for t, p in ((count, past), (1 if one else 9, 12))},
        bindings=[{"S": 4, "past": 3, "B": 2}, {"S": 11, "past": 17, "B": 3}],
        made=f"latent attention by hand: {style}; opset {opset}" + (", not optimised" if not optimize else ""),
        kda=0,
        mla=1,
        tags=("mla", "layer"),
    )


OTHER: dict[str, dict[str, Any]] = {
    "deepseek": dict(style="deepseek"),
    "deepseek_absorbed": dict(style="deepseek_absorbed", opset=23),
    "deepseek_cached": dict(style="deepseek_cached"),
    "legacy_deepseek": dict(style="deepseek_absorbed", legacy=True),
    "one_product": dict(style="one"),
    "one_product_sdpa": dict(style="one", sdpa=True, opset=24),
    "two_products": dict(style="two"),
    "tril": dict(style="tril"),
    "tril_noopt": dict(style="tril", optimize=False),
    "legacy_tril": dict(style="tril", legacy=True),
    "rows": dict(style="rows", opset=21),
    "rows_noopt": dict(style="rows", optimize=False),
    "inverse_op23": dict(style="inverse", opset=23),
    "scatter": dict(style="scatter"),
    "legacy_copy": dict(style="copy", legacy=True),
}

if __name__ == "__main__":
    for wanted in sys.argv[1:] or OTHER:
        other(wanted, **OTHER[wanted])
