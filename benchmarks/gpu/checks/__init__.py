"""Phase `checks`: what a device computes against the references. Nothing is timed.

May import common. Start with checks.py.
"""
