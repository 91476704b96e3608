"""Logits processors: what requests ask to be done to logits before a token is sampled, one file each.

Imports the edits that kernels know (kernels/interface/sampling/logits_processor_kernels.py); never a device.
Start with processor.py (the contract) and registry.py (the order). To add one: a file here, a line in registry.py.
"""
