"""Heads: small models that draft from a target's hidden states, on one backend.

Imports engine.checkpoints for what a head's directory says, models for packing, and the backend seam. Start
reading at head.py; loader.py builds a head.
"""
