"""Kernels in C++ for the CPU, built once per machine with the compiler that is there, or not used at all."""
