"""Drafts copied from text: suffix and n-gram look-up, and their one interface to the engine.

May import the contract of the planes, the Drafter protocol and kernels/cpu. Start reading in lookup.py; the
methods, with their sources, are explained in python/suffix.py and python/ngram.py.
"""
