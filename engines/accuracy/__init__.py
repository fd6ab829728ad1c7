"""A checkpoint beside its original on held-out text, layer by layer and token by token."""
