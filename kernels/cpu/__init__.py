"""Kernels in Numba and LLVM IR."""
