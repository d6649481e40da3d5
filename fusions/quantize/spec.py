"""What is to be quantized, and how: ``experts=int4:128,dense=int8:128``."""

from __future__ import annotations

from collections.abc import Mapping

from ...custom_ops.common.scheme import Scheme, parse_scheme

#: The groups of weights: experts of fused ``GroupedQMoE`` nodes, and the other large weights of MatMul and Gemm.
GROUPS = ("experts", "dense")
#: How numbers are rounded: to nearest; with scales searched for, weighted by the channels' mean squares; and with each
#: column's error made up for in the columns after it, which needs rows of the activations.
ALGORITHMS = ("nearest", "aware", "gptq")


class QuantizeError(ValueError):
    """A model whose weights can't be stored as asked."""


def parse_quantize(text: str | Mapping[str, str] | None) -> dict[str, Scheme]:
    """Schemes by group; empty for None, "" and "none".

    Args:
        text: ``GROUP=SCHEME`` separated by commas, or a mapping of the same.

    Raises:
        ValueError: an unknown group or scheme, a group given twice; the message says what was expected.
    """
    if text is None:
        return {}
    if isinstance(text, Mapping):
        pairs = [(str(group), str(scheme)) for group, scheme in text.items()]
    elif isinstance(text, str):
        if text.strip().lower() in ("", "none"):
            return {}
        pairs = []
        for item in text.split(","):
            group, equals, scheme = item.partition("=")
            if not equals:
                raise ValueError(f"{item.strip()!r}: expected GROUP=SCHEME, such as experts=int4:128")
            pairs.append((group.strip().lower(), scheme.strip()))
    else:
        raise ValueError(f"{text!r}: expected text such as experts=int4:128,dense=int8:128, or a mapping")
    found: dict[str, Scheme] = {}
    for group, scheme in pairs:
        if group not in GROUPS:
            raise ValueError(f"{group!r}: expected one of {', '.join(GROUPS)}")
        if group in found:
            raise ValueError(f"{group} is given twice")
        if scheme.lower() != "none":
            found[group] = made = parse_scheme(scheme)
            if group == "experts" and made.bits == 4 and made.block_size % 2:
                raise ValueError(
                    f"{scheme!r}: experts have two 4-bit numbers in a byte: blocks of an even number of columns"
                )
    return found
