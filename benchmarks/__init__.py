"""Measurements of FASER; `python -m benchmarks --help`, from the repository's root, lists the programs."""

import sys

# `python -m benchmarks.speed.default_flags`, as older results have it, would import a module and measure nothing.
_AS_MODULE = next((name for flag, name in zip(sys.orig_argv, sys.orig_argv[1:], strict=False) if flag == "-m"), "")
_PROGRAM = _AS_MODULE.removeprefix("benchmarks.")
if _PROGRAM != _AS_MODULE and not _PROGRAM.startswith(("gpu", "budget")):
    raise SystemExit(f"programs are run by one command now: python -m benchmarks {_PROGRAM}")
