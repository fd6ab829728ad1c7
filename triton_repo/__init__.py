"""Triton model repositories: rendering from an engine, combination, launch and check."""
