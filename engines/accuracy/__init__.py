"""Comparison of a quantized model with its original on held-out text, per layer and per token."""
