"""Checkpoints: where a model comes from and what its files describe. Loads no torch.

Imports gguf/, families/ and text/. Start with source.py (from a name to a path) and files.py (what they say).
"""
