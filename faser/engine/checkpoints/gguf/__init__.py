"""GGUF checkpoints: the file (file.py), and what the hub would have in its place (checkpoint.py).

Start with file.py.
"""
