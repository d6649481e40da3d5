"""Quantizing the weights of fused experts and of dense layers."""

from .initializers import Sources
from .passes import Quantize, RaiseOpset
from .spec import GROUPS, parse_quantize

__all__ = ["GROUPS", "Quantize", "RaiseOpset", "Sources", "parse_quantize"]
