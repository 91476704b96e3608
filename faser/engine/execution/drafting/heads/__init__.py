"""Heads that draft from the hidden states of the target: EAGLE-3, MTP, Gemma 4's assistant. Start with head.py."""
