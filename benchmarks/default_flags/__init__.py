"""What speculation brings through the server: `python -m benchmarks.default_flags QUESTIONS OUT`."""
