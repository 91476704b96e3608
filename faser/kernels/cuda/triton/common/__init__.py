"""What several Triton kernels share: argument checks, uploads, bits of 8-bit floats, arithmetic of norm and gate.

Imports Triton. Start reading at tensors.py.
"""
