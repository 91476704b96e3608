"""Text and token ids: tokenizers of checkpoints and GGUF files, and incremental detokenization. Loads no torch.

Imports checkpoints/gguf for the tokenizer of a GGUF file. Start with tokenizer.py and detokenizer.py.
"""
