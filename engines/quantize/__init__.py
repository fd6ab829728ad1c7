"""Post-training quantization: samples in, ModelOpt calibrates a layer at a time, codes and scales out."""
