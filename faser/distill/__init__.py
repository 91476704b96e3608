"""`faser distill`: trains a head that drafts for a model, from nothing but the model.

conversations/ makes the text, training/ the head. Start with conversations/maker.py.
"""
