"""What a config.json says about stored weights that are quantised: which kind, and what is refused by name.

Opens no tensor. Start reading at detection.py.
"""
