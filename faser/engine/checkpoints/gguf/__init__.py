"""GGUF checkpoints: the file, its weights under Hugging Face names, its metadata as a config.

Imports only faser.errors, so that engine/text can read the tokenizer of a GGUF file. Start with file.py.
"""
