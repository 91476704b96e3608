"""The CUDA backend: kernels of FlashInfer (flashinfer/) and of FASER (triton/), and access to the device.

Imports the interface, and torch.cuda when a device is opened. Start reading at flashinfer/backend.py. This code
was written from the sources of torch, Triton and FlashInfer and tested without a GPU; it has not run on one yet.
"""
