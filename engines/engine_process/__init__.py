"""Process of an engine: one runtime, fed over a local socket by the Python models that serve it."""
