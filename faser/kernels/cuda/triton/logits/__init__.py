"""Logits processors by Triton. Imports the contracts of kernels and triton/common.py.

Start with logit_edits.py, which callers on the host use; logit_rows.py has the kernels.
"""
