"""Kernels in Triton, for CUDA devices: whatever of a step no library computes as exactly as the engine defines it.

Each file is about one thing and ends with what Python calls: it checks shapes and types, launches, and never waits
for the device. Without a GPU the kernels run in Triton's interpreter, where TRITON_INTERPRET=1 was set before
Triton was first imported; that is for tests.
"""
