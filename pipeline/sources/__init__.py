"""Where inputs come from: Hugging Face repositories and calibration text."""
