"""Trains an EAGLE-3 head on the states of a frozen target, with torch alone.

Start with trainer.py; trainable_head.py has the arithmetic, unrolled_loss.py what is minimised.
"""
