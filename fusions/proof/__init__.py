"""Proof of a candidate: the region and what would replace it, run side by side on random and hostile inputs."""

from __future__ import annotations

from .prove import ProofBudget, Prover, prove

__all__ = ["ProofBudget", "Prover", "prove"]
