"""The decoder's operations as Triton kernels, for CUDA devices; Triton's interpreter runs them on a CPU."""
