"""Measurements on a CUDA device: checks first, then times, each next to the least that memory allows."""
