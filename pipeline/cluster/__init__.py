"""Builds on a Ray cluster: each stage on a machine that has what it needs, each artefact made once."""
