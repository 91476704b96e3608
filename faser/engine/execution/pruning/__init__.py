"""Early pruning: drafted tokens that the target will clearly refuse leave the forward before its last layers.

Off by default. The model executor knows it as one of its verification forwards and not by name. May import what
the rest of execution may import, except the executor. Start with early_pruning.
"""
