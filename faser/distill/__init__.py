"""`faser distill`: trains a head that drafts for a model, from nothing but the model. Needs torch alone.

questions.py, operator_files.py   where conversations come from: the model asks itself; files of the operator
maker.py, dataset.py              answers them; keeps them on disk
target.py, states.py              what the frozen target thinks of them; keeps that on disk
batch.py, head.py, arithmetic.py, trainer.py     learns an EAGLE-3 head from it
acceptance.py                     measures the head
distillation.py                   all of it, in one folder: start here
"""
