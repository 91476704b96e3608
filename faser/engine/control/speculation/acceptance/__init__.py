"""The acceptance model: how likely draft tokens are to be accepted, learned from earlier drafts.

Imports values and the contract; it knows neither costs nor policies.
Start with estimator.py; calibration.py and drift.py are its parts, draft_arrays.py makes its input.
"""
