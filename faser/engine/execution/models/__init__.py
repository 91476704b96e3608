"""Decoder models: weights from a checkpoint, packed for a backend, and the forward over the rows of a step.

Imports engine.checkpoints, for what a checkpoint says of itself, and the backend seam. Start reading at
decoder.py; loader.py builds a Decoder.
"""
