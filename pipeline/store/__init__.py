"""Content-keyed store of artefacts."""
