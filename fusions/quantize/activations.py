"""What a calibration knows of a model's activations, made into statistics when they are asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...custom_ops.common.quantize_matrix import Statistics

Array = NDArray[Any]


@dataclass(frozen=True)
class Seen:
    """One activation: each channel's mean square, and rows ``[n, channels]`` of it where some were kept."""

    mean_square: Array
    rows: Array | None = None


class Activations(Mapping[str, Statistics]):
    """Statistics by the value's name.

    Sums over the rows of wide activations are large, so only the last ones are kept.

    Args:
        seen: by the value's name; those that say nothing are left out.
        algorithm: "nearest" (to measure only), "aware" or "gptq".
    """

    def __init__(self, seen: Mapping[str, Seen], algorithm: str) -> None:
        self.algorithm = algorithm
        self._seen = {n: s for n, s in seen.items() if Statistics.of_channels(s.mean_square) is not None}
        self._last: tuple[str, Statistics] | None = None

    def __iter__(self) -> Iterator[str]:
        return iter(self._seen)

    def __len__(self) -> int:
        return len(self._seen)

    def __contains__(self, name: object) -> bool:
        return name in self._seen

    def __getitem__(self, name: str) -> Statistics:
        if self._last is None or self._last[0] != name:
            seen, rows = self._seen[name], self.rows(name)
            found = None if rows is None else Statistics.of(rows, self.algorithm)
            found = found or Statistics.of_channels(seen.mean_square, self.algorithm)
            assert found is not None
            self._last = (name, found)
        return self._last[1]

    def rows(self, name: str) -> Array | None:
        """Rows of a value, where there are some."""
        seen = self._seen.get(name)
        if seen is None or seen.rows is None or not len(seen.rows):
            return None
        return seen.rows[np.all(np.isfinite(seen.rows), axis=1)]
