"""Kernels in Triton for CUDA devices: the parts of a step that no library computes with the engine's exact bits.

A file holds one kernel, or a few, and ends with the function that Python calls: it checks shapes and dtypes,
launches, and never waits for the device. flashinfer/device_kernels.py lists these functions. Without a GPU the
kernels run in Triton's interpreter, if TRITON_INTERPRET=1 is set before the first import of Triton; that is for
tests. Start reading at layer_ops.py.
"""
