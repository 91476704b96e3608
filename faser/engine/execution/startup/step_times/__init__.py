"""How long steps take on this machine: measured at a first start, kept on disk, compared with a few at later ones.

Start with profile.py, then step_profiler.py.
"""
