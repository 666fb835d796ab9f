"""Kernels in C++ for the CPU: a wheel brings them, or the compiler that is there builds them once per machine."""
