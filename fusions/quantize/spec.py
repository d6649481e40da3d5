"""What is to be quantized, and how: ``experts=int4:128,dense=int8:128,cache=int8``."""

from __future__ import annotations

from collections.abc import Mapping

from ...custom_ops.common.scheme import Scheme, parse_scheme

#: What can be stored in a smaller format: weights of experts of fused ``GroupedQMoE`` nodes, the other large weights of
#: MatMul and Gemm, and the caches of latents of fused ``LatentAttention`` nodes.
GROUPS = ("experts", "dense", "cache")
#: Forms of a cache: one scale a channel, or one a token and 128 channels.
CACHE_SCHEMES = {
    "int8": Scheme("int8", text="int8"),
    "int8:channel": Scheme("int8", text="int8"),
    "fp8:128": Scheme("float8", 128, text="fp8:128"),
    "fp8:1x128": Scheme("float8", 128, text="fp8:128"),
}
#: How numbers are rounded: to nearest; with scales searched for, weighted by the channels' mean squares; and with each
#: column's error made up for in the columns after it, which needs rows of the activations.
ALGORITHMS = ("nearest", "aware", "gptq")


class QuantizeError(ValueError):
    """A model whose weights or caches can't be stored as asked."""


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
        if group == "cache" and scheme.lower() != "none":
            if scheme.lower() not in CACHE_SCHEMES:
                raise ValueError(f"cache={scheme!r}: a cache is held as int8 or as fp8:128")
            found[group] = CACHE_SCHEMES[scheme.lower()]
        elif scheme.lower() != "none":
            found[group] = made = parse_scheme(scheme)
            if group == "experts" and made.bits == 4 and made.block_size % 2:
                raise ValueError(
                    f"{scheme!r}: experts have two 4-bit numbers in a byte: blocks of an even number of columns"
                )
    return found
