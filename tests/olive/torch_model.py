"""A KDA layer in PyTorch for Olive's conversion, one token with its states, always of the same weights."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def load(_: str) -> Any:
    from exports.layer import Choice, Layer
    from exports.torch_side import fill

    return fill(Layer(Choice(conv="packed", conv_state=True)))


def example(_: Any) -> tuple[Any, ...]:
    arguments: tuple[Any, ...] = load("").example(1)
    return arguments
