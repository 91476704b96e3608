"""The values that pass between the planes, and between engine and front-end: plans, results, messages, step times.

May import `faser.types`, `faser.errors` and the configuration; no plane, no torch. Start reading at plan.py.
"""
