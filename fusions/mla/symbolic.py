"""Values that are made from sizes, positions and given masks, evaluated in closed form.

Every element of such a tensor is an expression of its place: that says what a mask is at every length, which no number
of runs could. What is not understood has no closed form, and the mask stays an operand.
"""

from __future__ import annotations

from .symbolic_moves import Moves
from .symbolic_values import Values


class Symbolic(Moves, Values):
    """Evaluates values of one graph."""
