"""What each part of speculation brings under a real trace of arrivals: `python -m benchmarks.ablation OUT`."""
