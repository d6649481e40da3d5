"""The fused ops: one folder an op, with its spec, portable body, float64 reference and kernels."""
