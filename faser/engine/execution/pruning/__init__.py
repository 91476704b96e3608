"""Early pruning: drafted tokens that the target will clearly refuse leave the forward before its last layers.

An extension of the model executor (see ../verification_forward.py) that no other module knows; it is off by default.
May import what the rest of execution may import, except the executor. Start with early_pruning.
"""
