"""How weights are to be quantized: ``int4:128``, ``int8:channel``, ``fp8:128x128``, ``bf16`` and their kin."""

from __future__ import annotations

from dataclasses import dataclass

#: Names in a scheme's text, and the stored formats behind them, symmetric and with zero points.
_FORMATS: dict[str, tuple[str, str | None]] = {
    "int4": ("int4", "uint4"),
    "uint4": ("uint4", "uint4"),
    "int8": ("int8", "uint8"),
    "uint8": ("uint8", "uint8"),
    "fp8": ("float8", None),
    "bf16": ("bfloat16", None),
}
_EXAMPLES = "int4:128, int4:128:asym, int8:128, int8:channel, fp8:128x128, bf16"


@dataclass(frozen=True)
class Scheme:
    """One way to store a weight matrix ``[rows, cols]``.

    Attributes:
        kind: ``int4``, ``uint4``, ``int8``, ``uint8``, ``float8`` or ``bfloat16``.
        block_size: columns that share a scale; 0: all of a row.
        block_rows: rows that share a scale.
        asymmetric: with zero points.
        text: as it was written.
    """

    kind: str
    block_size: int = 0
    block_rows: int = 1
    asymmetric: bool = False
    text: str = ""

    @property
    def bits(self) -> int:
        """Of one stored number."""
        return {"int4": 4, "uint4": 4, "bfloat16": 16}.get(self.kind, 8)

    def __str__(self) -> str:
        return self.text or self.kind


def parse_scheme(text: str) -> Scheme:
    """The scheme that ``FORMAT[:BLOCK][:asym]`` names.

    Raises:
        ValueError: it names none; the message says what was expected.
    """
    name, *rest = text.strip().lower().split(":")
    if name not in _FORMATS:
        raise ValueError(f"{text!r}: format {name!r} is none of {', '.join(_FORMATS)} (for example {_EXAMPLES})")
    symmetric, asymmetric = _FORMATS[name]
    wanted = name.startswith("u")
    if rest and rest[-1] in ("sym", "asym"):
        if asymmetric is None:
            raise ValueError(f"{text!r}: {name} has no zero points")
        if name.startswith("u") and rest[-1] == "sym":
            raise ValueError(f"{text!r}: {name} has zero points; {name[1:]} is the symmetric one")
        wanted = rest.pop() == "asym"
    if len(rest) > 1:
        raise ValueError(f"{text!r}: expected FORMAT:BLOCK or FORMAT:BLOCK:asym (for example {_EXAMPLES})")
    size, rows = _block(text, name, rest[0] if rest else "")
    kind = asymmetric if wanted and asymmetric is not None else symmetric
    return Scheme(kind, size, rows, wanted, text.strip().lower())


def _block(text: str, name: str, block: str) -> tuple[int, int]:
    """Columns and rows of a block."""
    if name == "bf16":
        if block:
            raise ValueError(f"{text!r}: bf16 has no blocks")
        return 0, 1
    if block == "channel":
        return 0, 1
    if not block:
        raise ValueError(f"{text!r}: expected a block, such as {name}:{'128x128' if name == 'fp8' else '128'}")
    parts = block.split("x")
    if not all(part.isascii() and part.isdigit() and int(part) > 0 for part in parts) or len(parts) > 2:
        raise ValueError(f"{text!r}: block {block!r} is not a number of columns, 'channel', or ROWSxCOLUMNS")
    sizes = [int(part) for part in parts]
    if len(sizes) == 1:
        return sizes[0], 1
    if name != "fp8" and sizes[0] != 1:
        raise ValueError(f"{text!r}: {name} has scales of its own for each row; only fp8 has blocks of rows")
    return sizes[1], sizes[0]
