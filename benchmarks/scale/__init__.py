"""Costs and gains of more than one engine, and of more than one process."""
