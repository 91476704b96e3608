"""What several Triton kernels share: argument checks, one upload for several host arrays, bits of 8-bit floats.

Imports Triton. Start reading at tensors.py.
"""
