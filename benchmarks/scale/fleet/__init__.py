"""A fleet on paper: up to a thousand replicas behind a router, and what breaks first.

Run it as `python -m benchmarks.scale.fleet`. Start reading at simulation.py.
"""
