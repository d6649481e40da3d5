"""Mixture of experts with group-limited routing and quantized weights."""
