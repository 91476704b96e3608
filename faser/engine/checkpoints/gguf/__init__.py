"""GGUF checkpoints: the file (file.py), and what the hub would have in its place (checkpoint.py).

Imports only faser.errors, so that engine/text can read the tokenizer of a GGUF file. Start with file.py.
"""
