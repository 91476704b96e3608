"""`faser env` and `faser pull`: commands that need no running engine."""
