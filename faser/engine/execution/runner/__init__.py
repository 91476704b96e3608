"""The runner: a model's forward over the rows of a step, and the arrays that describe those rows.

Imports the models, the samplers and the backend seam. Start reading at runner.py.
"""
