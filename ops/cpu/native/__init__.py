"""C++ kernels for the CPU. A wheel contains them; otherwise a compiler builds them once per machine."""
