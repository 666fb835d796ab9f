"""The bridge's extra kernels."""
