"""The tables of ops and of targets: who can run what, from which ONNX Runtime on."""
