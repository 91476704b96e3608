"""CUDA graphs of a runner's steps: captured once at start, replayed instead of launching kernel after kernel.

Imports the runner, the models, the samplers and the backend seam. Start reading at graph_runner.py.
"""
