"""The HTTP front-end: an OpenAI-compatible API over an engine client. Loads no torch.

May import config, metrics, the engine's contract, client, text and checkpoints. Start with app.py, then
routes/completions.py and serving/handler.py.
"""
