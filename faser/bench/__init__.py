"""Measures an engine in this process: prompts, cells, report, plots."""
