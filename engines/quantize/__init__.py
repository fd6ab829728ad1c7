"""Post-training quantization: ModelOpt calibrates one layer at a time; codes and scales are written."""
