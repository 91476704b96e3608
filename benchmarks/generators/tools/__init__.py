"""How each load generator is told what to do, and how its results are read: one file a tool.

Imports figures alone. `tool.py` is the contract, `catalogue.py` lists all runs.
"""
