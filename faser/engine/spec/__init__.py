"""Speculation: what is drafted, by whom, what is verified, and how it is judged."""
