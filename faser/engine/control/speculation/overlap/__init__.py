"""Overlapped drafting: drafts that are made while a step verifies earlier ones.

Imports the policies' objective, the acceptance estimates and the cost model.
Start with control.py; objective.py says when it pays, frontiers.py which drafts still stand.
"""
