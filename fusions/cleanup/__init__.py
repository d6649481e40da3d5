"""Clean-up passes: bring the export styles together without changing values."""

from __future__ import annotations

from ..passes import Pass
from .branches import InlineBranches
from .casts import RemoveIdleCasts
from .constants import FoldConstants, LiftConstants
from .expands import SpellExpands
from .functions import InlineLocalFunctions
from .identities import RemoveIdentities
from .infer import InferTypes
from .repair import RepairNormScale
from .rms_norm import RmsNorms
from .sequences import SplitSequences
from .sizes import SpellSizes
from .softmax import JoinSoftmax
from .splits import RemoveIdleSplits
from .units import RemoveUnitFactors


def cleanup_passes() -> list[Pass]:
    """The clean-ups in the order they are run."""
    return [
        InlineLocalFunctions(),
        LiftConstants(),
        SplitSequences(),
        InferTypes(),
        RepairNormScale(),
        RemoveIdentities(),
        RemoveIdleCasts(),
        FoldConstants(),
        InferTypes("infer-types-again"),  # shapes that were computed are constants now
        FoldConstants("fold-constants-again"),
        InlineBranches(),
        SpellSizes(),
        SpellExpands(),
        RemoveUnitFactors(),
        RemoveIdleSplits(),
        JoinSoftmax(),
        RmsNorms(),
    ]


__all__ = ["cleanup_passes"]
