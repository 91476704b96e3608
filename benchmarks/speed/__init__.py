"""Costs and gains of serving: default flags against off, steps against another checkout, and the host's part."""
