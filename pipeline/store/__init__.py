"""Artefacts, kept under keys of what they were made from."""
