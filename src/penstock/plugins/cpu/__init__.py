"""Attention on a CPU with NumPy and loops compiled by Numba."""
