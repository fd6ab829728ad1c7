"""Engine process: one runtime that receives requests over a local socket from Triton's Python models."""
