"""Conversations to learn from: questions and answers of a model, as token ids in shards on disk.

maker.py makes them, dataset.py keeps them. Knows no torch; an AnswerSource computes.
"""
