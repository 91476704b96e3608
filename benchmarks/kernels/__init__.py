"""Kernels of the CPU by themselves: products, attention, steps; and what low bits cost in quality."""
