"""Text look-up in Python: for machines without a C++ compiler, and the oracle of the native index.

One Drafter a file. May import what text_lookup may. Start reading in ngram.py.
"""
