"""Engine in, model repository out."""
