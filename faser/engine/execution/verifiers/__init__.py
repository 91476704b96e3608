"""Verifiers: which draft tokens the target accepts, and the token that follows them, given the target's logits.

Imports sampling, the plan's values and the contract of kernels. Start with verifier.py, then sample_and_match.py.
"""
