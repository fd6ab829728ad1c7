"""Builds on a Ray cluster: each stage where what it needs is, each artefact once, its files through the store."""
