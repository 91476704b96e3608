"""Heads: small models that draft from a target's hidden states, as the config.json of a directory describes them.

Every layout becomes one HeadSpec; what cannot be computed is refused by name. Start reading at head_spec.py.
"""
