"""The TensorRT-LLM checkpoint format: its layout, conversion to it and back, and the memory that its tensors take."""
