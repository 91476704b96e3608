"""The way to a lent machine and back: the bundle, kernels compiled ahead, and a rehearsal under its rules.

May import common. Start with bundle.py.
"""
