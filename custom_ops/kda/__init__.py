"""Kimi Delta Attention: the gated delta rule with a decay per key channel."""
