"""Decode attention in kernels of our own: one text for Metal, CUDA and the C++ of the tests."""
