"""TensorRT-LLM checkpoint format: layout, conversion to and from Hugging Face, memory of its tensors."""
