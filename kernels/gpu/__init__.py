"""Kernels in Triton: the twins, bit for bit, of those on the CPU."""
