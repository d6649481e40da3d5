"""Quantizing the weights of fused experts and of dense layers."""

from .activations import Activations, Seen
from .initializers import Sources
from .passes import Quantize, RaiseOpset
from .spec import ALGORITHMS, GROUPS, QuantizeError, parse_quantize

__all__ = [
    "ALGORITHMS",
    "GROUPS",
    "Activations",
    "Quantize",
    "QuantizeError",
    "RaiseOpset",
    "Seen",
    "Sources",
    "parse_quantize",
]
