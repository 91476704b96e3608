"""`faser bench`: measurements in this process.

Imports faser.bench. Start with spec.py; spec_arguments.py has its flags, spec_setup.py what they select.
"""
