"""The backend on FlashInfer: paged attention, norms and gates; torch's matrix products; FASER's Triton kernels.

Imports the interface, the device (cuda/device.py) and triton/. library.py alone imports the package flashinfer, on
demand. Start reading at backend.py.
"""
