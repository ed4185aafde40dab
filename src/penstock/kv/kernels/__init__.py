"""Decode attention in kernels of our own: one text for Metal, CUDA and the C++ of the tests."""

OFF = "PENSTOCK_KERNELS"
"""Variable of the environment that turns kernels off in a process, unless a setting names them."""
