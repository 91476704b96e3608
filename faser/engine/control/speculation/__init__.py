"""Speculation in the control plane: which sequences draft, how far, and what is verified. No torch.

Imports the contract, sequences and the cost model; the scheduler calls it.
Start with control.py, the order of a step; then policy.py and acceptance.py.
"""
