"""The simulator: the real scheduler and policies on a simulated clock, with a trace in place of the model.

Run it as `python -m benchmarks simulator`. Start reading at simulation.py.
"""
