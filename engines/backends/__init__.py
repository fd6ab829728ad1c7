"""Runtimes: one module for each, with what `base.EngineBackend` asks for."""
