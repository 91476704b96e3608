"""Overlap: drafting and verification at the same time, each in a lane with processors of its own.

A partition divides the processors: CPU cores, CUDA streams, CUDA green contexts, or not at all (serial). Imports
config, errors and kernels; nothing else of the engine. Start with partition.py, then lanes.py.
"""
