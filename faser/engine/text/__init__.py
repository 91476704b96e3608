"""Text and token ids: tokenizers and incremental detokenization. Loads no torch.

Start with tokenizer.py and detokenizer.py.
"""
