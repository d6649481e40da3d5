"""A region cut down to a part that proves the whole, as :meth:`FusedOp.shrink` gives it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from ..candidate import Candidate
from .extract import Cut

Arrays = dict[str, np.ndarray]


@dataclass
class Shrunk:
    """The part: its candidate, its nodes, constants and input shapes.

    Attributes:
        candidate: the candidate of the part; it reads and gives the same values of the graph.
        kept: what stays, such as the numbers of the heads, for the report.
        share: how large the part is, of the whole.
        cut: nodes, tensors and input shapes.
        parameters: the op's parameters for the part, from the whole's candidate and the constants' arrays. It need
            not make those of the whole.
    """

    candidate: Candidate
    kept: tuple[int, ...]
    share: float
    cut: Cut
    parameters: Callable[[Candidate, Mapping[ir.Value, np.ndarray]], Arrays]
