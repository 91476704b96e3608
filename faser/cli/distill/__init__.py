"""`faser distill`: makes a head that drafts for a model. Start with command.py; faser.distill does the work."""
