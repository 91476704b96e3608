"""The contract between the engine and the kernels: protocols, and the values that cross them.

Imports torch and numpy, no backend. Start reading at backend.py and shapes.py.
"""
