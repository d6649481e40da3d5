"""The options of ``deltafuse.fuse`` that say how to quantize, and what a calibration gives for them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from .errors import OptionError


def quantize_options(
    quantize: str | Mapping[str, str] | None, calibration: str | os.PathLike[str] | None, algorithm: str
) -> dict[str, Any]:
    """The pipeline's options, read and checked.

    Raises:
        OptionError: a value that is not taken, or a calibration that has not what they need.
    """
    from .fusions.quantize import ALGORITHMS, parse_quantize

    try:
        schemes = parse_quantize(quantize)
    except ValueError as error:
        raise OptionError(f"quantize: {error}") from error
    if calibration is not None and not schemes:
        raise OptionError("calibration: there is nothing to quantize; give quantize too, such as experts=int4:128")
    if algorithm not in ("auto", *ALGORITHMS):
        raise OptionError(f"algorithm {algorithm!r}: expected one of auto, {', '.join(ALGORITHMS)}")
    if algorithm in ("aware", "gptq") and calibration is None:
        raise OptionError(f"algorithm {algorithm}: give a calibration, which `deltafuse calibrate` writes")
    if not schemes:
        return {}
    options: dict[str, Any] = {"quantize": schemes}
    if calibration is not None and "cache" in schemes:
        options["channels"] = _channels(calibration)
    elif "cache" in schemes and schemes["cache"].kind == "int8":
        raise OptionError("quantize: cache=int8 takes its scales from a calibration: `deltafuse calibrate` writes one")
    if calibration is not None and schemes.keys() - {"cache"}:
        options["statistics"] = _statistics(calibration, algorithm)
    return options


def _channels(calibration: str | os.PathLike[str]) -> Any:
    """What a calibration knows of the channels of values, by their names; those that they were moved from too."""
    from .calibration import load
    from .fusions.mla.quantized_cache import SeenChannels

    found: dict[str, SeenChannels] = {}
    for tensor in load(calibration).tensors.values():
        seen = SeenChannels(tensor.amax, tensor.mean_square, tensor.samples, tensor.rows)
        found[tensor.name] = seen
        for alias in tensor.aliases:
            found.setdefault(alias, seen)
    return found


def _statistics(calibration: str | os.PathLike[str], algorithm: str) -> Any:
    """What a calibration knows, by the names of values; those that they were moved from too."""
    from .calibration import load
    from .fusions.quantize import Activations, Seen

    tensors = load(calibration).tensors.values()
    holds_rows = any(found.samples is not None and len(found.samples) for found in tensors)
    if algorithm == "gptq" and not holds_rows:
        raise OptionError(
            f"algorithm gptq: {os.fspath(calibration)} holds no rows of activations: `deltafuse calibrate --rows 1024`"
        )
    seen: dict[str, Seen] = {}
    for found in tensors:
        for alias in found.aliases:
            seen.setdefault(alias, Seen(found.mean_square, found.samples))
    for found in tensors:
        seen[found.name] = Seen(found.mean_square, found.samples)
    if algorithm == "auto":
        algorithm = "gptq" if holds_rows else "aware"
    made = Activations(seen, algorithm)
    if not made and algorithm != "nearest":
        raise OptionError(
            f"calibration: {os.fspath(calibration)} has nothing but zeros and numbers that are not finite"
        )
    return made
