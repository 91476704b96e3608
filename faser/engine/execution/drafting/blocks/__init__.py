"""Drafters of whole blocks in one pass: DFlash, DFlash 2, DSpark. Start with model.py."""
