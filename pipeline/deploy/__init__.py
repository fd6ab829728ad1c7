"""Manifests for clusters, made from an engine's passport, with nothing that a person must fill in."""
