"""The sequences that are served, and the KV blocks that they hold.

Written by the scheduler alone; knows no policy. Start reading at sequence.py.
"""
