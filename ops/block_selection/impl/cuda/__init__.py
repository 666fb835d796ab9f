"""Block selection on a GPU: kernels in Triton."""
