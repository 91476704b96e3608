"""Tries the container image as its users run it: locked down, stopped in mid-answer, as the chart's pod.

`python -m benchmarks image` is the command; containers.py drives podman or docker, trials.py has what is tried.
"""
