"""Cut a frozen block and its candidate down to two heads, where the region is shown to keep heads apart."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from ..candidate import Candidate
from ..graph import GraphView
from ..proof.extract import Extract
from ..proof.shrink import Shrunk
from ..proof.spread import HeadsMix


def shrink(view: GraphView, candidate: Candidate, extract: Extract, arrays: Mapping[ir.Value, np.ndarray]) -> Shrunk:
    """Cut to the first and the last head.

    Raises:
        HeadsMix: the region can't be shown to keep heads apart.
    """
    raise HeadsMix("no cut is known for latent attention")
