"""Graphs on a CPU: the kernels of a function, recorded while it runs and replayed without Python."""
