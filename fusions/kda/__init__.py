"""The recogniser of Kimi Delta Attention."""
