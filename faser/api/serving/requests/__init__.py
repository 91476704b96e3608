"""What a checked body asks for, as engine values: token ids of prompts, sampling and speculation parameters.

Imports protocol/, middleware/ and templates/. request_builder.py, one folder up, puts them together.
"""
