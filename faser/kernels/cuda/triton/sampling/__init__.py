"""Sampling by Triton: tokens and draft tokens, bit for bit as the tensor operations define them.

Imports the contracts of kernels and triton/common.py. Start with token_kernels.py, which lists the launches; the
host_* and device_* modules are what callers use.
"""
