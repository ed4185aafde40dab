"""Decode attention in custom kernels, from one source for Metal, CUDA and C++ (in tests)."""
