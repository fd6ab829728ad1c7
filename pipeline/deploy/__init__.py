"""Manifests for clusters, from an engine's passport: what runs where, and nothing that a person must fill in."""
