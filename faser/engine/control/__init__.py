"""The control plane: which sequences run, what they draft, which blocks they hold. Sees ids, counts and seconds.

May import `contract` and the configuration; never torch, never `execution`. Start reading at scheduler.py.
"""
