"""What each part of speculation gains under a real trace of arrivals: `python -m benchmarks.ablation OUT`."""
