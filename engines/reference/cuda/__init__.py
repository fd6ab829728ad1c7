"""GPU parts of the reference runtime: fused operations, CUDA graphs, kernels."""
