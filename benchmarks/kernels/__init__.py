"""Kernels of the CPU by themselves: products, attention, sampling, steps; and what low bits cost in quality."""
