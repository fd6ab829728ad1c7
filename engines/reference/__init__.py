"""Reference runtime: a small interpreter of TensorRT-LLM checkpoints for any machine with PyTorch."""
