"""From engine outputs to the JSON of an answer: choices, log probabilities, usage, the report on speculation.

Imports protocol/ and requests/. Start with formatter.py, the seam between chats and completions.
"""
