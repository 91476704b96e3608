"""Phases that time steps and policies on one stream, vLLM's among them, and the device's own rates.

May import common. Start with plain.py.
"""
