"""The HTTP bodies: pydantic schemas, how bodies are read and checked, and the one shape of every error.

Imports only faser.errors. Start with common.py (the fields) and body.py (from bytes to a checked body).
"""
