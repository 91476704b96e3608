"""From engine outputs to the JSON of an answer: choices, their frames, usage, the report on speculation.

Imports bodies/, middleware/, parsing/ and requests/. Start with handler.py, then framing.py.
"""
