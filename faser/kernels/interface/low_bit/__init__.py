"""Low-bit weights: the block formats of GGUF files, and the definition of products with them, bit for bit.

Imports torch and numpy, no backend. Start reading at formats.py, then rows.py and product.py.
"""
