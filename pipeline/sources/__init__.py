"""Sources of inputs: Hugging Face repositories and calibration datasets."""
