"""Engine backends: one module per runtime, each with the interface `base.EngineBackend`."""
