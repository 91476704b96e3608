"""From a checked body to engine requests, and from engine outputs to an answer.

Imports protocol/, middleware/ and templates/, but no route. requests/ has what goes in, answers/ what comes out.
Start with request_builder.py and handler.py.
"""
