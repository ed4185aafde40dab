"""Custom kernels for decode attention, from one source for Metal, CUDA and C++ (in tests)."""
