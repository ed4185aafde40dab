"""Decode attention in our own kernels: one text for Metal, CUDA and the C++ of the tests."""
