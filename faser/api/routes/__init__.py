"""One module per group of routes; each has a function that returns its router.

Imports protocol/ and serving/. Start with completions.py.
"""
