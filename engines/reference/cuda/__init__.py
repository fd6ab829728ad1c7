"""GPU parts of the reference runtime: CUDA graphs, kernels."""
