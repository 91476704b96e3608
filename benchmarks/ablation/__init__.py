"""Gains of each part of speculation under a real trace of arrivals: `python -m benchmarks ablation OUT`."""
