"""Flags, FASER_* variables and the config file: from the sources of settings to checked configs, and their help.

Imports config/. Start with sources.py; parser.py reads the command line, help.py prints the settings.
"""
