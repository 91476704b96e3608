"""What a backend's sampling kernels do: choose tokens, judge drafts, edit logits; and the parameters they read.

Imports torch and numpy, nothing else of the interface. Start reading at sampling_kernels.py.
"""
