"""Structured output, measured: the schemas, the two libraries side by side, and what constrained decoding costs.

Imports faser. Start with schemas.py; each command is `python -m benchmarks.structured.NAME --help`.
"""
