"""Drafters: a draft model, a head, text and grammars, behind one protocol.

May import the contract of the planes, checkpoints, structure, models, runner, sampling and the backend seam. Start
reading in drafter.py, then loop.py; registry.py makes the configured drafter.
"""
