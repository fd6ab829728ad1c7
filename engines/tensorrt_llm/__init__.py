"""The TensorRT-LLM checkpoint format, its writer, and the engine build."""
