"""Attention on a CPU: NumPy, and loops that Numba compiles."""
