"""Measurements of FASER; `python -m benchmarks --help`, from the repository's root, lists the programs."""
