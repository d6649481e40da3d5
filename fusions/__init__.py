"""Recognise, prove, rewrite: passes over onnx-ir models."""
