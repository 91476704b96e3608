"""Measurements of FASER; run from the repository's root as modules, e.g. `python -m benchmarks.peers.run`."""
