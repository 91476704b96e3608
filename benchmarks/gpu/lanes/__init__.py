"""Phases `lanes` and `overlap`: a device in parts, and drafting that overlaps with verification.

May import common and decoding. Start with lanes.py.
"""
