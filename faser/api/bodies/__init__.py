"""HTTP bodies: how they are read and checked, the fields that dialects share, and the one shape of every error.

Imports values only. Start with fields.py, then body.py (from bytes to a checked body).
"""
