"""The HTTP front-end: an OpenAI-compatible API over an engine client. Loads no torch.

    http -> middleware -> dialects: bodies -> requests -> (the engine) -> answers, with parsing

May import config, metrics, the engine's contract, client, text and checkpoints. Start with app.py, then
dialects/completions_requests.py and answers/handler.py.
"""
