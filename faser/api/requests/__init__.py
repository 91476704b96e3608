"""Conversion of a checked body into engine values: token ids of prompts, sampling and speculation parameters.

Imports bodies/, middleware/ and parsing/. Start with service.py (what all routes share) and sampling.py.
"""
