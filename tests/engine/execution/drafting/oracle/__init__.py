"""Drafts from text in Python: one Drafter a file, the oracles of the native index. Start reading in ngram.py."""
