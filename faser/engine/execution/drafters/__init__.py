"""Drafters that run a model, and the protocol of all drafters.

May import the contract of the planes, runner and sampling. Start reading in drafter.py; passes.py is the drafting
loop of draft_model.py and layer_skip.py. drafter_registry.py, one folder up, makes the configured drafter.
"""
