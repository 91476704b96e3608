"""The CUDA backend: kernels of FlashInfer (flashinfer/) and of FASER (triton/), and access to the device.

Imports the interface, and torch.cuda when a device is opened. Start reading at flashinfer/backend.py. Tests
need no GPU; docs/gpu.md says what was checked on one.
"""
