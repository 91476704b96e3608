"""Structured output: from what a request asks for to the tokens that it allows next, by llguidance.

Imports values, settings and the tokenizer; knows no tensors, no schedule and no HTTP. Start with
sequence_matchers.py; compiler.py translates, compiles and remembers.
"""
