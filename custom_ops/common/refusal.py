"""Refusals: why something was not done, as data that reports, the doctor and logs can show."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Refusal:
    """A reason not to fuse, prove or run something.

    Attributes:
        code: short stable identifier for programs, for example ``"head-dim"``.
        reason: one sentence for people: what was found and what was expected.
        node: name of the node concerned, or ``""`` where there is none.
    """

    code: str
    reason: str
    node: str = ""

    def __str__(self) -> str:
        return f"{self.reason} (node {self.node!r})" if self.node else self.reason
