"""Phase `checks`: what a device computes against the references. Nothing is timed. Start with checks.py."""
