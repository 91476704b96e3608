"""The monitoring of deploy/ tried for real: a server under load, a Prometheus, faults that must alert.

    python -m benchmarks observability OUT [--prompts question.jsonl] [--sheets FOLDER]

Start with __main__.py. Imports benchmarks.serving.chaos for the server; needs Debian's package prometheus.
"""
