"""The process that trains a server's head on its traffic, one round after the other, as the front-end asks.

Start with worker.py; learner.py is a round.
"""
