"""The CUDA backend: FlashInfer's kernels (flashinfer/), FASER's own in Triton (triton/), and the device around
them.

Imports the interface, and torch.cuda when a device is opened. Start reading at flashinfer/backend.py. This code
was written from the sources of torch, Triton and FlashInfer and tested without a GPU; it has not run on one yet.
"""
