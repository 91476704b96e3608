"""The runner: a model's forward over the rows of a step, eager or through CUDA graphs.

Imports the models, the samplers and the backend seam. Start reading at runner.py.
"""
