"""What a frozen target thinks of conversations: hidden states, and its next-token distributions.

recorder.py computes them with the engine's own products and keeps them on disk. Start with target_states.py.
"""
