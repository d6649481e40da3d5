"""Rows of activations that a calibration keeps: a fixed number of each, drawn evenly from all that went by."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


class Rows:
    """Keeps ``count`` rows of all that are added, each with the same chance (reservoir sampling).

    Args:
        count: rows that are kept.
        seed: equal ones keep the same rows of the same additions.
    """

    def __init__(self, count: int, seed: int) -> None:
        self._count, self._rng = count, np.random.default_rng(seed)
        self._kept: NDArray[np.float32] | None = None
        self._filled = self._seen = 0

    def add(self, rows: NDArray[Any]) -> None:
        """Rows ``[n, channels]``."""
        if self._kept is None:
            self._kept = np.empty((self._count, rows.shape[1]), np.float32)
        direct = min(self._count - self._filled, len(rows))
        self._kept[self._filled : self._filled + direct] = rows[:direct]
        self._filled += direct
        places = self._rng.integers(0, np.arange(self._seen + direct, self._seen + len(rows)) + 1)
        taken = places < self._count
        self._kept[places[taken]] = rows[direct:][taken]  # of equal places the last one counts
        self._seen += len(rows)

    def kept(self) -> NDArray[np.float32]:
        """Those that there are, ``[n, channels]``."""
        return np.zeros((0, 0), np.float32) if self._kept is None else self._kept[: self._filled].copy()
