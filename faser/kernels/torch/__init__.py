"""The torch backend: the reference that other backends are tested against, on any device of torch.

Imports torch and the interface only. Start reading at backend.py.
"""
