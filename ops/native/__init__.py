"""Kernels in C++ for the CPU: a wheel brings them, or they are built once per machine with the compiler that is there."""
