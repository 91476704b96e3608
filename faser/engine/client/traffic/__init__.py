"""Finished answers that are kept: which of them may be, in a file for `faser distill`, or in memory for a learner.

Imports the contract, never torch. Start with request_traffic.py.
"""
