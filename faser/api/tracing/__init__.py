"""A span for each HTTP request that asks for an answer.

middleware.py begins and ends it; the request's handler says, through request_trace.py, what is in it.
"""
