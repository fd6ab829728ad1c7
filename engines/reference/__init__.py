"""The reference runtime: a small interpreter of TensorRT-LLM checkpoints, on any machine that has PyTorch."""
